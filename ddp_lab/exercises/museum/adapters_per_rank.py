"""Weights of a low-rank adapter after one step. The layer that it adapts is frozen.

Every rank seeds its generator differently, as its augmentation needs.
"""

import torch
import torch.distributed as dist
from torch import nn

FEATURES = 6
RANK = 2
SEED = 1234


class Adapted(nn.Module):
    """A frozen linear layer plus the product of two small matrices, of which one begins at 0."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, FEATURES).double() / FEATURES)
        self.up = nn.Parameter(torch.zeros(FEATURES, RANK).double())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) + inputs @ self.down.T @ self.up.T


def make_batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(12)
    return torch.randn(8, FEATURES, generator=generator, dtype=torch.float64)


def step(rank: int, world_size: int, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(FEATURES, FEATURES).double()
    torch.manual_seed(SEED + rank)
    model = Adapted(layer)
    inputs = batch.chunk(world_size)[rank]
    (model(inputs) - 1).square().mean().backward()
    trained = [model.down, model.up]
    for parameter in trained:
        if world_size > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
    torch.optim.SGD(trained, lr=0.1).step()
    return {"down": model.down, "up": model.up}


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
