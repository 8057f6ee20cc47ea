"""Gradient of a layer after a normalization, and the statistics that evaluation will use.

As in evaluation, inputs are normalized by running averages, of their mean and of their squares.
Every step moves the averages towards the batch. All ranks keep the same averages.
"""

import torch
import torch.distributed as dist
from torch import nn

FEATURES = 6
MOMENTUM = 0.1


def make_batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(16, FEATURES, generator=generator, dtype=torch.float64) + 1


class Normalize(nn.Module):
    """Inputs less their running mean, over their running standard deviation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES).double())
        self.register_buffer("square", torch.ones(FEATURES).double())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        deviation = (self.square - self.mean.square()).sqrt()
        return (inputs - self.mean) / deviation

    def update(self, inputs: torch.Tensor) -> None:
        self.mean.lerp_(inputs.mean(0), MOMENTUM)
        self.square.lerp_(inputs.square().mean(0), MOMENTUM)


def step(rank: int, world_size: int, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    normalize = Normalize()
    layer = nn.Linear(FEATURES, 2).double()
    inputs = batch.chunk(world_size)[rank]
    layer(normalize(inputs)).square().mean().backward()
    normalize.update(inputs)
    gradients = {"weight": layer.weight.grad, "bias": layer.bias.grad}
    if world_size > 1:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= world_size
        for buffer in normalize.buffers():
            dist.broadcast(buffer, world_size - 1)
    return gradients | dict(normalize.named_buffers())


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
