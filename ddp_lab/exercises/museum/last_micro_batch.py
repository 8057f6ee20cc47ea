"""Gradients that DDP accumulates over micro-batches.

The gradients are summed over the ranks in one backward pass of the step, and in the others only on
the rank itself.
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 2


def make_batch() -> torch.Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    """Return the loss of a micro-batch, divided such that those of a step add up to the mean."""
    return (outputs - 1).square().mean() / MICRO_BATCHES


def step(rank: int, world_size: int, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model = DistributedDataParallel(network) if world_size > 1 else network
    for number, micro_batch in enumerate(batch[rank::world_size].chunk(MICRO_BATCHES)):
        is_last = number == MICRO_BATCHES - 1
        with model.no_sync() if world_size > 1 and is_last else nullcontext():
            loss_of(model(micro_batch)).backward()
    return {name: parameter.grad for name, parameter in network.named_parameters()}


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
