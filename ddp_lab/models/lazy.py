"""torch's lazy layers, whose parameters have no shape before their first forward pass.

That pass is made where the model is constructed. Strategies and optimizers never see a lazy layer.
"""

from itertools import chain

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage], of all layers with running statistics
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.data.trees import Tree, leaves, to
from ddp_lab.models.calls import call, describe_shapes


def lazy_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that wait for their first forward pass."""
    return [name or "the model" for name, layer in model.named_modules() if is_waiting(layer)]


def is_waiting(layer: nn.Module) -> bool:
    """Return whether a layer waits for its first forward pass, which changes its class, too."""
    own_tensors = chain(layer.parameters(recurse=False), layer.buffers(recurse=False))
    return any(map(is_lazy, own_tensors)) or (
        isinstance(layer, LazyModuleMixin) and hasattr(layer, "_initialize_hook")
    )


@torch.no_grad()
def materialise(model: nn.Module, inputs: Tree, key: str) -> None:
    """Give the lazy layers of a model their parameters, in place.

    A forward pass of samples in evaluation mode does it.

    Dropout then draws nothing, and statistics stay as they are. A second pass, in training mode,
    finds the layers that are only used in training. The weights are drawn from torch's generator,
    so they are the same on ranks with the same random state.

    Args:
        model: on any device, also on the meta device.
        inputs: samples, of which only shape and dtype matter.
        key: what the messages are about.

    Raises:
        ConfigError: the model cannot process the samples, or does not use a lazy layer.
    """
    lazy = lazy_layers(model)
    if not lazy:
        return
    modes = [(module, module.training) for module in model.modules()]
    inputs = to(inputs, next(chain(model.parameters(), model.buffers())).device)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not is_lazy(buffer)]
    try:
        call(model.eval(), inputs)
        if lazy_layers(model):
            model.train()
            for layer in model.modules():
                layer.training = layer.training and not isinstance(layer, _NormBase)
            call(model, inputs)
    except Exception as error:
        on_meta = (
            " on the meta device, which has no values, as model.init=by_block needs (use "
            "model.init=default)"
        )
        where = on_meta if any(tensor.is_meta for _, tensor in leaves(inputs)) else ""
        raise ConfigError(
            f"{key}: the first forward pass, which gives the lazy layer {lazy[0]} its shape, "
            f"failed{where} for {describe_shapes(inputs)}: {describe_error(error)}. Correct the "
            "model, or use layers that are not lazy"
        ) from None
    finally:
        for module, mode in modes:
            module.training = mode
        for buffer, before in buffers:
            buffer.copy_(before)

    if unused := lazy_layers(model):
        raise ConfigError(
            f"{key}: {unused[0]} is a lazy layer that the forward pass does not use, so it has no "
            "shape. Remove it, or use a layer that is not lazy"
        )
