"""Gradients that are accumulated over micro-batches, and then averaged over the ranks.

One rank is the reference: it has the memory for the batch at once.
"""

import torch
import torch.distributed as dist
from torch import nn

MICRO_BATCHES = 2


def make_batch() -> torch.Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def accumulate(model: nn.Module, samples: torch.Tensor) -> None:
    """Compute the gradient of the mean loss, one micro-batch after the other."""
    for micro_batch in samples.chunk(MICRO_BATCHES):
        model.zero_grad()
        loss = (model(micro_batch) - 1).square().mean()
        (loss / MICRO_BATCHES).backward()


def step(rank: int, world_size: int, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    if world_size == 1:
        (model(batch) - 1).square().mean().backward()
    else:
        accumulate(model, batch.chunk(world_size)[rank])
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
    return {name: parameter.grad for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
