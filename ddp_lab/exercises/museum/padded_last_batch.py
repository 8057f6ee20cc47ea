"""Gradient of the last batch of an epoch, whose samples do not divide by the number of ranks.

The sampler gives every rank the same number of samples, so that no rank waits for another.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

SAMPLES = 9


def make_batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(14)
    return torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)


def step(rank: int, world_size: int, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model = DistributedDataParallel(network) if world_size > 1 else network
    sampler = DistributedSampler(batch, world_size, rank, shuffle=False)
    own_samples = batch[list(sampler)]
    losses = (model(own_samples) - 1).square().mean(1)
    losses.mean().backward()
    return {name: parameter.grad for name, parameter in network.named_parameters()}


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
