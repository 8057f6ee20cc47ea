"""Whether the statistics that a layer keeps of its batch can be those of the global batch.

A layer of a class that is not known is tried: a copy of it gets random inputs.
"""

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage], the only base of all BatchNorms
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage], likewise
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
ALLOWED = (
    "nn.BatchNorm1d, nn.BatchNorm2d and nn.BatchNorm3d with track_running_stats, and subclasses "
    "that compute the same and then call their child modules in order, as timm's BatchNormAct2d "
    "its drop and act"
)


def why_unsupported(layer: nn.Module) -> str:
    """Return why a layer's statistics cannot be those of the global batch.

    Return "" if they can, or if it keeps none.
    """
    if isinstance(layer, _InstanceNorm):
        if layer.track_running_stats:
            return "its running statistics would be those of the local batch"
        return ""
    if isinstance(layer, _BatchNorm):
        if not layer.track_running_stats:
            return (
                "it has no running statistics, so an evaluation would depend on the number of ranks"
            )
        # A subclass of nn.SyncBatchNorm cannot be tried: it may use the process group.
        is_tried = not isinstance(layer, nn.SyncBatchNorm)
        is_same = type(layer) in KNOWN or (is_tried and is_followed_by_children(layer))
        return "" if is_same else "its class may compute something else than torch's BatchNorm"

    buffers = [name for name, _ in layer.named_buffers(recurse=False)]
    statistics = [
        name for name in buffers if name.startswith("running_") or name == "num_batches_tracked"
    ]
    if statistics and changes_buffers(layer, layer.get_buffer(statistics[0]).numel()):
        return f"its {statistics[0]} would be computed from the local batch"
    return ""


@torch.no_grad()
def is_followed_by_children(layer: _BatchNorm) -> bool:
    """Return whether a layer computes torch's BatchNorm, then calls its child modules in order."""
    with torch.random.fork_rng(devices=[]):
        accepted = [
            inputs for inputs in inputs_of(layer, layer.num_features) if accepts(layer, inputs)
        ]
        same = [
            is_same_for(layer, inputs, training)
            for inputs in accepted
            for training in (True, False)
        ]
        return bool(same) and all(same)


def accepts(layer: _BatchNorm, inputs: torch.Tensor) -> bool:
    """Return whether a layer is for inputs with as many dimensions."""
    with suppress(ValueError):
        layer._check_input_dim(inputs)  # pyright: ignore[reportPrivateUsage]
        return True
    return False


def is_same_for(layer: _BatchNorm, inputs: torch.Tensor, training: bool) -> bool:
    """Return whether these inputs show no difference to torch's BatchNorm before the children."""
    with suppress(Exception):
        copied = cast(_BatchNorm, trial_copy(layer).train(training))
        plain = copy.deepcopy(copied)
        torch.default_generator.manual_seed(0)  # of dropout
        with Operations() as of_copy:
            outputs = copied.forward(inputs)
        torch.default_generator.manual_seed(0)
        with Operations() as of_plain:
            expected = _BatchNorm.forward(plain, inputs)
            for child in plain.children():
                expected = child(expected)

        if of_copy.names != of_plain.names:
            return False
        buffers = zip(copied.buffers(), plain.buffers(), strict=True)
        return torch.equal(outputs, expected) and all(
            torch.equal(buffer, other) for buffer, other in buffers
        )
    return False


class Operations(TorchDispatchMode):
    """Records what is computed with numbers that have a fraction.

    Equal outputs are not enough: a layer may clamp its inputs, which changes only large ones.

    Attributes:
        names: of torch's operators, in order.
    """

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        arguments = tree_leaves((args, kwargs))
        if any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in arguments):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def changes_buffers(layer: nn.Module, channels: int) -> bool:
    """Return whether a forward pass in training changes, or may change, a layer's buffers."""
    changed: list[bool] = []
    with torch.random.fork_rng(devices=[]):
        for inputs in inputs_of(layer, channels):
            with suppress(Exception):  # the layer is for inputs of another shape
                copied = trial_copy(layer).train()
                before = [buffer.clone() for buffer in copied.buffers()]
                copied.forward(inputs)
                pairs = zip(copied.buffers(), before, strict=True)
                changed.append(not all(torch.equal(after, other) for after, other in pairs))
    return not changed or any(changed)


def trial_copy(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer on the CPU, with random numbers as its parameters and buffers.

    The values of the layer are not read: on the meta device, and in a plan, it has none.
    """
    memo: dict[int, torch.Tensor] = {}
    for tensor in layer.buffers():
        memo[id(tensor)] = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    for tensor in layer.parameters():
        memo[id(tensor)] = nn.Parameter(
            torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu"), tensor.requires_grad
        )
    torch.default_generator.manual_seed(0)
    for tensor in memo.values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
    return copy.deepcopy(layer, memo)


def inputs_of(layer: nn.Module, channels: int) -> Iterator[torch.Tensor]:
    """Yield random inputs of a layer, [b, channels, ...], in the dtype of its statistics.

    They have two to five dimensions.
    """
    dtypes = [buffer.dtype for buffer in layer.buffers() if buffer.is_floating_point()]
    dtype = dtypes[0] if dtypes else torch.get_default_dtype()
    generator = torch.Generator().manual_seed(1)
    for shape in ((), (3,), (3, 2), (2, 3, 2)):
        yield torch.randn(5, channels, *shape, generator=generator, dtype=dtype)
