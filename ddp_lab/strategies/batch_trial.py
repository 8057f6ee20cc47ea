"""Statistics of the batch that a model computes outside of its BatchNorm layers, found by a trial.

They would be those of the local batch, so that they differ between the ranks: a layer may call
F.batch_norm itself, or keep an average of its batches in a buffer of its own.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage], the only base of all BatchNorms
from torch.overrides import TorchFunctionMode

from ddp_lab.data.trees import Tree, apply, leaves, to
from ddp_lab.models.calls import arguments_of, call
from ddp_lab.models.kept_state import state_kept
from ddp_lab.models.trial import fake_copy, is_large
from ddp_lab.models.usage import drawn_like

FUNCTIONS = ("batch_norm", "native_batch_norm")
TRAINING = 5  # number of the argument `training` of all of them

Buffers = dict[str, torch.Tensor]


class Functional(TorchFunctionMode):
    """Records the modules outside BatchNorm layers that normalise by the statistics of the batch.

    Attributes:
        running: names of the modules whose `forward` is running, the innermost one last.
        without_layer: names of the innermost modules that do so.
    """

    def __init__(self, layers: set[str]):
        super().__init__()
        self.layers = layers
        self.running = [""]
        self.without_layer: list[str] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in FUNCTIONS:
            training = args[TRAINING] if len(args) > TRAINING else kwargs.get("training", False)
            if training and self.running[-1] not in self.layers:
                self.without_layer.append(self.running[-1])
        return func(*args, **kwargs)


def other_statistics(model: nn.Module, example: Tree) -> tuple[str, str] | None:
    """Return the name of a module with statistics of the local batch, and the reason; or None.

    Its state stays as it is. None is found in a model that cannot run.

    Args:
        model: complete, with its BatchNorm layers.
        example: two samples, on the meta device.
    """
    modules = dict(model.named_modules())
    layers = {name for name, module in modules.items() if isinstance(module, _BatchNorm)}
    recorder = Functional(layers)
    results = list[Mapping[str, torch.Tensor]]()
    for draw in range(2):  # from the same state
        with suppress(Exception), state_kept(model):
            results.append(buffers_after_step(model, samples(model, example, draw), recorder))

    for name in recorder.without_layer:
        return (
            name,
            "it calls F.batch_norm with training=True, whose statistics would be those of the "
            "local batch",
        )

    for name, buffer in results[0].items() if len(results) == 2 else ():
        owner, _, buffer_name = name.rpartition(".")
        if owner not in layers and not buffer.is_meta and not torch.equal(buffer, results[1][name]):
            return owner, f"its buffer {buffer_name} would be computed from the local batch"
    return None


def changing_buffer(model: nn.Module, example: Tree) -> str | None:
    """Return the name of a buffer outside BatchNorm layers that every training pass changes.

    None is returned if there is none, or if the model cannot run. A buffer that a pass sets again
    to the same values, as a cache, does not count. The model's state stays as it is.

    Args:
        model: complete.
        example: two samples, on the meta device.
    """
    layers = {name for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    names = [
        name
        for name, buffer in model.named_buffers()
        if name.rpartition(".")[0] not in layers and not buffer.is_meta
    ]
    if not names or (is_large(model) and writes_no_buffer(model, example, names)):
        return None
    with suppress(Exception), state_kept(model):
        inputs = samples(model, example, 0)
        before = buffers_after_step(model, inputs, Functional(layers))
        after = buffers_after_step(model, inputs, Functional(layers), before)
        return next((name for name in names if not torch.equal(before[name], after[name])), None)
    return None


def writes_no_buffer(model: nn.Module, example: Tree, names: Sequence[str]) -> bool:
    """Return whether a forward pass in training changes no buffer; False if that is not known.

    It runs without data, so that a large model takes no time.

    Args:
        model: complete, which stays as it is.
        example: two samples, on the meta device.
        names: of the buffers that matter.
    """
    with suppress(Exception), state_kept(model, weights=False), fake_copy(model) as copied:
        before = {name: copied.get_buffer(name) for name in names}
        versions = {name: buffer._version for name, buffer in before.items()}
        call(copied.train(), drawn_like(example))
        now = dict(copied.named_buffers(remove_duplicate=False))
        return all(
            now.get(name) is buffer and buffer._version == versions[name]
            for name, buffer in before.items()
        )
    return False


def samples(model: nn.Module, example: Tree, draw: int) -> Tree:
    """Return samples on the model's device: random numbers, or one number if no fractions."""
    generator = torch.Generator().manual_seed(draw)

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        values = torch.full_like(tensor, draw, device="cpu")
        if values.is_floating_point():
            return values.uniform_(draw, 2 * draw + 1, generator=generator)
        return values

    device = next((tensor.device for tensor in model.parameters()), "cpu")
    return to(apply(drawn, example), device)


def buffers_after_step(
    model: nn.Module,
    inputs: Tree,
    recorder: Functional,
    before: Mapping[str, torch.Tensor] | None = None,
) -> Buffers:
    """Return what the buffers are after a forward pass in training, which changes copies of them.

    Args:
        before: what they are before it; None: those of the model.
    """
    initial = dict(model.named_buffers()) if before is None else before
    buffers: Buffers = {name: buffer.clone() for name, buffer in initial.items()}
    model.train()
    recorder.running = [""]
    with ExitStack() as stack:
        for name, module in model.named_modules():
            enter = module.register_forward_pre_hook(
                lambda *_, name=name: recorder.running.append(name)
            )
            leave = module.register_forward_hook(
                lambda *_: clear(recorder.running.pop()), always_call=True
            )
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        devices = {tensor.device for _, tensor in leaves(inputs) if tensor.is_cuda}
        stack.enter_context(torch.random.fork_rng([*devices]))
        torch.manual_seed(0)
        with torch.enable_grad(), recorder:
            functional_call(model, buffers, *arguments_of(inputs))
    return buffers


def clear(_: object) -> None:
    """Return None, because what a forward hook returns takes the place of the outputs."""
