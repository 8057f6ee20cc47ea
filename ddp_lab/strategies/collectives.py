"""Collectives that autograd can go through. Each says what the ranks do with its result, on which its backward depends."""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.view_as(tensor)

    backward = staticmethod(_SumOverRanks.backward)


class _JoinChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size(ctx.group), dim=1)[dist.get_rank(ctx.group)], None


def sum_over_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum of the ranks' tensors, where every rank goes on to a loss of its own: backward sums the ranks' gradients."""
    return _SumOverRanks.apply(tensor, group)


def copy_to_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """A tensor that is the same on all ranks, at the entry of work that they share: forward does nothing, backward sums what
    each rank's part of the work asks of it ("f" in Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053)."""
    return _CopyToRanks.apply(tensor, group)


def join_channels(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The ranks' channels [b, c / ranks, ...] one after the other, [b, c, ...] on every rank, which all go on to the same loss:
    so each has the whole gradient, and backward takes the own part."""
    return _JoinChannels.apply(tensor, group)
