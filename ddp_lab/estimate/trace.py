"""A forward and backward pass of a block on fake tensors: what it saves, allocates and computes."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ddp_lab.estimate.recorder import Operation, Recorder, key_of
from ddp_lab.strategies.activation_checkpointing import kept


@dataclass(frozen=True)
class Traced:
    """What a block does with a batch. All sizes are bytes.

    Attributes:
        input, output: of the block.
        saved: what autograd keeps for the backward pass, without parameters, the input and the output.
        keeps_input, keeps_output: whether it keeps them, too.
        in_place: whether the output has the memory of the input: of an operation in place, or of a view.
        selective: results that selective activation checkpointing keeps.
        gradients: of the parameters, as the backward pass allocates them.
        forward_peak: most that the forward pass allocates, with the output and what is saved.
        backward_peak: most that is in use in the backward pass: what the forward pass has left, gradients and temporaries.
        forward, backward: the operations.
    """

    input: int
    output: int
    saved: int
    keeps_input: bool
    keeps_output: bool
    in_place: bool
    selective: int
    gradients: int
    forward_peak: int
    backward_peak: int
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]


class Begin(torch.autograd.Function):
    """The rest of a model before a block: operations in place can change the output of another block, but no leaf."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def output_of_another_block(given: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the memory of an input of a block that is no leaf of autograd if it requires a gradient."""
    return cast(torch.Tensor, Begin.apply(given)) if given.requires_grad else given


class End(torch.autograd.Function):
    """The rest of a model after a block: its gradient is allocated when the backward pass begins, and freed once it is used."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.like = output.shape, output.dtype
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        shape, dtype = ctx.like
        return torch.ones(shape, dtype=dtype)


class Saved:
    """The storages that autograd saves. Use `hooks` as the context of a forward pass."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sizes[key_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def hooks(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)


class Float32Norms(TorchFunctionMode):
    """Lets layer normalizations and softmax compute in float32, as autocast does on CUDA and not on the CPU."""

    functions = (F.layer_norm, F.group_norm, F.softmax, F.log_softmax)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self.functions:
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.float(), (args, kwargs))
        return func(*args, **kwargs or {})


@contextmanager
def mixed_precision(autocast: bool) -> Generator[None]:
    """Compute in bf16 as autocast does on CUDA, with tensors on the CPU; without `autocast` do nothing."""
    if not autocast:
        yield
        return
    with torch.autocast("cpu", torch.bfloat16), Float32Norms():
        yield


@contextmanager
def without_onednn() -> Generator[None]:
    """Compute an LSTM step by step: oneDNN's fused one does not say on fake tensors what it keeps."""
    library = torch.backends.mkldnn
    before = library.enabled
    library.enabled = False
    try:
        yield
    finally:
        library.enabled = before


def trace(
    run: Callable[[torch.Tensor], torch.Tensor],
    own: Sequence[torch.Tensor],
    given: torch.Tensor,
    autocast: bool,
    recorder: Recorder | None = None,
) -> tuple[Traced, torch.Tensor]:
    """Run a block forward and backward. Call it within a FakeTensorMode, or with few real samples (real_trace.py).

    Args:
        run: the block.
        own: its parameters and others that exist anyway.
        given: its input, which requires a gradient unless nothing before it is trained.
        autocast: whether the forward pass runs in bf16 by autocast.
        recorder: None: a new one.

    Returns:
        The record, and a tensor like the output on the meta device.
    """
    given = output_of_another_block(given)
    others, saved = {key_of(tensor) for tensor in [*own, given]}, Saved()
    with recorder or Recorder(kept()) as recorder:
        with saved.hooks(), mixed_precision(autocast), without_onednn():
            output = run(given)
        forward_peak, forward, kept_by_selective = recorder.peak, recorder.restart(), recorder.kept
        inner = {key: size for key, size in saved.sizes.items() if key not in others | {key_of(output)}}
        keeps_input, keeps_output = key_of(given) in saved.sizes, key_of(output) in saved.sizes
        in_place = key_of(output) == key_of(given)
        layout, size = layout_of(output), output.untyped_storage().nbytes()
        if output.requires_grad:
            end = cast(torch.Tensor, End.apply(output))
            del output
            recorder.restart()
            end.backward()
        backward_peak, backward = recorder.peak, recorder.restart()[2:]  # without the gradient that `End` makes
    gradients = [tensor.grad for tensor in own if tensor.grad is not None]
    record = Traced(
        input=given.untyped_storage().nbytes(),
        output=size,
        saved=sum(inner.values()),
        keeps_input=keeps_input,
        keeps_output=keeps_output,
        in_place=in_place,
        selective=kept_by_selective,
        gradients=sum(gradient.nbytes for gradient in gradients),
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        forward=tuple(forward),
        backward=tuple(backward),
    )
    return record, on_meta(layout)


Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return shape, strides and dtype of a tensor, and whether it requires a gradient."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def on_meta(layout: Layout) -> torch.Tensor:
    """Return a tensor of a layout on the meta device."""
    shape, strides, dtype, trained = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta", requires_grad=trained)
