"""Gradients of two layers under tensor parallelism: the first is split by outputs, then by inputs.

Each rank computes some of the hidden units, for the complete batch. The bias of the second layer
is added once, after the sum over the ranks, so every rank has it.
"""

import torch
import torch.distributed as dist

INPUTS = 5
HIDDEN = 8
OUTPUTS = 3


def make_batch() -> torch.Tensor:
    return torch.randn(8, INPUTS, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


class SumOverRanks(torch.autograd.Function):
    """The sum over the ranks of a tensor; its gradient is the same on every rank."""

    @staticmethod
    def forward(ctx, partial):
        total = partial.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def gather(shard: torch.Tensor, dim: int, world_size: int) -> torch.Tensor:
    """Return the complete tensor of the ranks' shards."""
    shards = [torch.empty_like(shard) for _ in range(world_size)]
    dist.all_gather(shards, shard.contiguous())
    return torch.cat(shards, dim)


def step(rank: int, world_size: int, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    up = torch.randn(HIDDEN, INPUTS, generator=generator, dtype=torch.float64)
    down = torch.randn(OUTPUTS, HIDDEN, generator=generator, dtype=torch.float64)
    bias = torch.zeros(OUTPUTS, dtype=torch.float64, requires_grad=True)
    own_up = up.chunk(world_size, 0)[rank].clone().requires_grad_()
    own_down = down.chunk(world_size, 1)[rank].clone().requires_grad_()

    partial = torch.tanh(batch @ own_up.T) @ own_down.T
    outputs = (SumOverRanks.apply(partial) if world_size > 1 else partial) + bias
    (outputs - 1).square().mean().backward()
    if world_size == 1:
        return {"up": own_up.grad, "down": own_down.grad, "bias": bias.grad}

    dist.all_reduce(bias.grad)
    return {
        "up": gather(own_up.grad, 0, world_size),
        "down": gather(own_down.grad, 1, world_size),
        "bias": bias.grad,
    }


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
