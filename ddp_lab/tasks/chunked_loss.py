"""The cross-entropy of a linear layer's outputs, computed in chunks of rows.

    each chunk:  hidden -> logits -> losses -> gradient of the logits -> gradients of hidden, weight

The gradients are computed in the forward pass, so that the logits of one chunk exist at a time and
nothing is computed twice. The logits of GPT-2 for 32 samples of 1,024 tokens take 3.07 GiB in bf16,
and their gradient as much.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ddp_lab.tasks.base import in_float32
from ddp_lab.tasks.tokens import IGNORE

# gets logits, targets and a factor, as `loss_of_chunk`
LossOfChunk = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Chunks(NamedTuple):
    """How rows are divided, and what is computed of each chunk.

    Attributes:
        number: of chunks.
        loss: `loss_of_chunk`, or what it was compiled to.
    """

    number: int
    loss: LossOfChunk


def loss_of_chunk(
    logits: torch.Tensor, targets: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    """Return the sum of the cross-entropies of some rows, [], and replace the logits.

    The logits become their gradient, times the factor: softmax(logits) - one_hot(targets), and 0 in
    rows that do not count. Softmax and losses are computed in float32, of float64 in float64. The
    sum is in that dtype.

    Args:
        logits: [rows, classes].
        targets: int64, [rows]; IGNORE in rows that do not count.
        factor: of the gradient, [].
    """
    numbers = in_float32(logits)
    counts = targets != IGNORE
    classes = torch.where(counts, targets, 0)[:, None]
    log_sums = numbers.logsumexp(-1, keepdim=True)
    losses = (log_sums - numbers.gather(1, classes))[:, 0]
    # compared instead of scattered, so that torch.compile makes one kernel of it
    is_target = torch.arange(logits.size(1), device=logits.device) == classes
    gradient = (numbers - log_sums).exp() - is_target.to(numbers.dtype)
    logits.copy_(gradient * torch.where(counts, factor, 0)[:, None])
    return torch.where(counts, losses, 0).sum()


class ChunkedLoss(torch.autograd.Function):
    """The sum of the cross-entropies of `hidden @ weight.T`, [].

    Args of `forward`:
        hidden: [rows, width], in the dtype of the matrix multiplications.
        weight: [classes, width], in any dtype.
        targets: int64, [rows]; IGNORE in rows that do not count.
        factor: a number, or a tensor [] on the device, that the sum will be multiplied by before
            the backward pass. The gradients of the logits contain it: in float16 those of a scaled
            loss would be 0 without it.
        chunks: of the rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        factor: float | torch.Tensor,
        chunks: Chunks,
    ) -> torch.Tensor:
        of_hidden, of_weight, *_ = ctx.needs_input_grad
        sum_dtype = torch.promote_types(hidden.dtype, torch.float32)
        if isinstance(factor, torch.Tensor):
            factor = factor.to(hidden.device, sum_dtype, non_blocking=True)
        else:  # filled on the device, where a copy of a number would be waited for
            factor = torch.full((), factor, dtype=sum_dtype, device=hidden.device)
        to_hidden = torch.empty_like(hidden) if of_hidden else None
        to_weight = torch.zeros_like(weight, dtype=sum_dtype) if of_weight else None
        ctx.weight_dtype = weight.dtype
        weight = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=sum_dtype, device=hidden.device)

        rows_at_once = max(1, math.ceil(len(hidden) / chunks.number))
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), rows_at_once):
                rows = slice(start, start + rows_at_once)
                logits = hidden[rows] @ weight.t()
                total += chunks.loss(logits, targets[rows], factor)
                if to_hidden is not None:
                    torch.mm(logits, weight, out=to_hidden[rows])
                if to_weight is not None:
                    add_product(to_weight, logits.t(), hidden[rows])
        ctx.save_for_backward(to_hidden, to_weight, factor)
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: torch.Tensor
    ) -> Any:
        to_hidden, to_weight, factor = ctx.saved_tensors
        ratio = gradients[0] / factor  # exactly 1 if the factor was the announced one
        if to_hidden is not None:
            to_hidden = to_hidden * ratio.to(to_hidden.dtype)
        if to_weight is not None:
            to_weight = (to_weight * ratio).to(ctx.weight_dtype)
        return to_hidden, to_weight, None, None, None


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left @ right` to a matrix, in place.

    Args:
        total: [m, n], in the dtype of the factors, or in float32 for those in half precision.
        left: [m, k].
        right: [k, n].
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif adds_in_float32(type(total), left.dtype, left.device):
        # added in float32 by the kernel of the multiplication, which rounds nothing and saves a
        # pass over the matrix
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


@cache
def adds_in_float32(
    kind: type[torch.Tensor], half_dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether a product of half precision can be added to a matrix of float32 unrounded.

    torch does so on GPUs, and not on the CPU. Its releases differ in which dtypes they accept, so
    it is tried, without waiting for the device.

    Args:
        kind: class of the tensors. Those of a plan, without values, may accept more than others, so
            each class has an answer of its own.
        half_dtype: of the factors.
        device: of all tensors.
    """
    total = torch.zeros(8, 8, device=device)
    factor = torch.zeros(8, 8, device=device, dtype=half_dtype)
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
