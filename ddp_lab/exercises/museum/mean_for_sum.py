"""Gradients under DDP, of a loss that is divided by the size of the global batch.

So samples have equal weights also if the ranks have different numbers of them.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_batch() -> torch.Tensor:
    return torch.randn(10, 6, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


def step(rank: int, world_size: int, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    model = DistributedDataParallel(network) if world_size > 1 else network
    own_samples = batch[rank::world_size]
    loss_sum = (model(own_samples) - 1).square().sum()
    loss = loss_sum / len(batch)
    loss.backward()
    return {name: parameter.grad for name, parameter in network.named_parameters()}


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
