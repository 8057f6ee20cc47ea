"""Weights after each of three steps, with a learning rate that halves every two steps.

The loop counts steps for its progress bar and for the schedule.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

STEPS = 3
HALF_LIFE = 2


def make_batch() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(10), dtype=torch.float64)


def step(rank: int, world_size: int, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    schedule = LambdaLR(optimizer, lambda number: 0.5 ** (number / HALF_LIFE))
    weights = {}
    for number in range(1, STEPS + 1):
        optimizer.zero_grad()
        (model(batch[rank::world_size]) - 1).square().mean().backward()
        for parameter in model.parameters():
            if world_size > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
        optimizer.step()
        for _ in range(world_size):
            schedule.step()
        for name, parameter in model.named_parameters():
            weights[f"step {number}/{name}"] = parameter.detach().clone()
    return weights


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
