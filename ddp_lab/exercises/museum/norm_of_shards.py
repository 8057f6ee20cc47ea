"""Gradients that are sharded over the ranks, clipped to a largest norm, and gathered.

Each rank sums the gradients of all samples for its own rows only (reduce-scatter).
"""

import torch
import torch.distributed as dist
from torch import nn

MAX_NORM = 0.1


def make_batch() -> torch.Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(16), dtype=torch.float64)


def reduce_scatter(gradient: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return this rank's rows of the mean over the ranks."""
    if world_size > 1:
        dist.all_reduce(gradient)
    return gradient.chunk(world_size)[rank] / world_size


def gather(shard: torch.Tensor, world_size: int) -> torch.Tensor:
    if world_size == 1:
        return shard
    shards = [torch.empty_like(shard) for _ in range(world_size)]
    dist.all_gather(shards, shard.contiguous())
    return torch.cat(shards)


def norm_of(shards: list[torch.Tensor], world_size: int) -> torch.Tensor:
    """Return the norm of the gradient."""
    squares = torch.stack([shard.square().sum() for shard in shards]).sum()
    return squares.sqrt()


def step(rank: int, world_size: int, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    (model(batch[rank::world_size]) - 2).square().mean().backward()
    names = [name for name, _ in model.named_parameters()]
    shards = [reduce_scatter(p.grad, rank, world_size) for p in model.parameters()]
    scale = (MAX_NORM / norm_of(shards, world_size)).clamp(max=1)
    clipped = [gather(shard * scale, world_size) for shard in shards]
    return dict(zip(names, clipped, strict=True))


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
