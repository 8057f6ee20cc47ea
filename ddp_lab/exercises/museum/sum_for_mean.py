"""Gradients of a network under data parallelism, with the collectives written by hand.

The gradients of all ranks are packed into one bucket, for one all-reduce in place of many.
"""

import torch
import torch.distributed as dist
from torch import nn


def make_batch() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def reduce_in_one_bucket(parameters: list[nn.Parameter]) -> None:
    """Put the gradient over all ranks into every parameter."""
    bucket = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(bucket)
    start = 0
    for parameter in parameters:
        end = start + parameter.numel()
        parameter.grad.copy_(bucket[start:end].view_as(parameter))
        start = end


def step(rank: int, world_size: int, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    inputs = batch.chunk(world_size)[rank]
    loss = (model(inputs) - 1).square().mean()
    loss.backward()
    if world_size > 1:
        reduce_in_one_bucket(list(model.parameters()))
    return {name: parameter.grad for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
