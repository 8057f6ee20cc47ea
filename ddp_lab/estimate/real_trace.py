"""Blocks whose forward pass reads values (`.item()`, `.nonzero()`, `.numpy()`), which fake tensors do not have.

Two small batches of real tensors pass forward and backward on the CPU. Sizes and FLOPs are affine functions of the number of
samples, so those of a larger batch follow from the two.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ddp_lab.estimate.recorder import Operation, Recorder
from ddp_lab.estimate.trace import Traced, trace
from ddp_lab.strategies.activation_checkpointing import kept

FEW = 2, 4  # samples of the two batches; BatchNorm needs two


class Timeline(Recorder):
    """Records the bytes in use after every operation, too: at another moment more may be in use in a larger batch.

    Attributes:
        moments: of each part of the trace, which `restart` ends.
    """

    def __init__(self) -> None:
        super().__init__(kept())
        self.moments = [[0]]

    def restart(self) -> list[Operation]:
        self.moments.append([self.live])
        return super().restart()

    def __torch_dispatch__(self, *arguments: Any) -> Any:
        result = super().__torch_dispatch__(*arguments)
        self.moments[-1].append(self.live)
        return result


def trace_values(make: Callable[[], nn.Module], given: torch.Tensor, autocast: bool) -> tuple[Traced, torch.Tensor]:
    """Trace a block that reads values. The result is that of `trace`.

    Args:
        make: returns a real copy of the block.
        given: its input on the meta device, which requires a gradient unless nothing before it is trained.
        autocast: whether the forward pass runs in bf16 by autocast.
    """
    samples, traced = len(given), list[tuple[Traced, torch.Tensor, Timeline]]()
    for number in FEW:
        block, recorder = make(), Timeline()
        inputs = torch.empty_strided((number, *given.shape[1:]), given.stride(), dtype=given.dtype)
        with torch.random.fork_rng([]):
            inputs = inputs.uniform_().requires_grad_(given.requires_grad)
            traced.append((*trace(block, list(block.parameters()), inputs, autocast, recorder), recorder))
    (small, before, first), (large, after, second) = traced
    shape, strides = series(before.shape, after.shape, samples), series(before.stride(), after.stride(), samples)
    output = torch.empty_strided(shape, strides, dtype=after.dtype, device="meta", requires_grad=after.requires_grad)
    sizes = {
        name: extend(getattr(small, name), getattr(large, name), samples)
        for name in ("input", "output", "saved", "selective", "gradients")
    }
    record = replace(
        large,
        **sizes,
        forward_peak=max(series(first.moments[0], second.moments[0], samples)),
        backward_peak=max(series(first.moments[-2], second.moments[-2], samples)),
        forward=operations(small.forward, large.forward, samples),
        backward=operations(small.backward, large.backward, samples),
    )
    return record, output


def extend(small: float, large: float, samples: int) -> int:
    """Return the value for a number of samples, from those of the two small batches."""
    return round(small + (large - small) * (samples - FEW[0]) / (FEW[1] - FEW[0]))


def series(small: Sequence[float], large: Sequence[float], samples: int) -> list[int]:
    """Return the values for a number of samples, one for each operation of the two small batches."""
    if len(small) != len(large):  # values have decided which operations run
        small = [value * FEW[0] / FEW[1] for value in large]
    return [extend(*pair, samples) for pair in zip(small, large, strict=True)]


def operations(small: Sequence[Operation], large: Sequence[Operation], samples: int) -> tuple[Operation, ...]:
    """Return the operations for a number of samples, from those of the two small batches."""
    columns = [
        series([getattr(each, name) for each in small], [getattr(each, name) for each in large], samples)
        for name in ("flops", "nbytes", "rows")
    ]
    return tuple(
        each._replace(flops=flops, nbytes=nbytes, rows=rows) for each, flops, nbytes, rows in zip(large, *columns, strict=True)
    )
