"""Differentiable collectives.

The backward pass of a collective depends on how the ranks use its result. If each rank computes its own loss from the result,
the ranks' gradients are summed. If all ranks compute the same loss from it, each rank already has the complete gradient.

In each `backward` one rule of the type checker is disabled, because the annotation of `once_differentiable` loses the name of
`ctx`. A `group` of None means all ranks.
"""

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable


class Context(FunctionCtx):
    """The values that forward stores for backward."""

    group: dist.ProcessGroup | None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sum(gradients[0], ctx.group), None


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sum(gradients[0], ctx.group), None


class _JoinChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        shards = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, tensor.contiguous(), group=group)
        return torch.cat(shards, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0].chunk(dist.get_world_size(ctx.group), dim=1)[dist.get_rank(ctx.group)], None


def _sum(gradient: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    gradient = gradient.contiguous().clone()
    dist.all_reduce(gradient, group=group)
    return gradient


def sum_over_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the sum of all ranks' tensors, from which each rank computes its own loss.

    Backward: the sum of all ranks' gradients.
    """
    return _SumOverRanks.apply(tensor, group)


def copy_to_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return `tensor`, which is the same on all ranks, as the input of a layer of which each rank computes a shard.

    This is "f" in Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053.

    Backward: the sum of the gradients that the ranks' shards contribute.
    """
    return _CopyToRanks.apply(tensor, group)


def join_channels(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Concatenate all ranks' channels, [b, c / ranks, ...], to [b, c, ...], from which all ranks compute the same loss.

    Backward: this rank's channels of the gradient.
    """
    return _JoinChannels.apply(tensor, group)
