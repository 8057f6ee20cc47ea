"""Gradients of a regression, clipped to a largest norm, under data parallelism.

The update is meant to be that of one device: as long as the limit at most.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

SAMPLES = 16
MAX_NORM = 0.5


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    targets = inputs.cumsum(1)[:, ::3] + 2
    return inputs, targets


def average(gradients: list[torch.Tensor], world_size: int) -> None:
    """Replace gradients by their mean over the ranks."""
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= world_size


def step(
    rank: int, world_size: int, batch: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)).double()
    inputs, targets = (tensor[rank::world_size] for tensor in batch)
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    clip_grad_norm_(model.parameters(), MAX_NORM)
    if world_size > 1:
        average(gradients, world_size)
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, gradients, strict=True))


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
