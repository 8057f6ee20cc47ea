"""Weights and their moving average (EMA) after each of two steps.

Each rank keeps the rows of the weight that are its shard, and the complete bias. The average has
the same shards. They are gathered to be returned.
"""

import torch
import torch.distributed as dist

ROWS = 8
COLUMNS = 5
DECAY = 0.9
LEARNING_RATE = 0.1


def make_batch() -> torch.Tensor:
    return torch.randn(8, COLUMNS, generator=torch.Generator().manual_seed(15), dtype=torch.float64)


def gather(shard: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return the complete weight."""
    if world_size == 1:
        return shard.clone()
    shards = [torch.empty_like(shard) for _ in range(world_size)]
    dist.all_gather(shards, shard.contiguous())
    return torch.cat(shards)


def gradients_of(weight: torch.Tensor, bias: torch.Tensor, batch: torch.Tensor) -> list:
    leaves = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    loss = (torch.tanh(batch @ leaves[0].T + leaves[1]) - 1).square().mean()
    return list(torch.autograd.grad(loss, leaves))


def step(rank: int, world_size: int, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    complete = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).double()
    weights = {
        "weight": complete.chunk(world_size)[rank].clone(),
        "bias": torch.zeros(ROWS).double(),
    }
    averages = {name: tensor.clone() for name, tensor in weights.items()}
    sharded = ["weight"] if world_size > 1 else []
    tensors = {}
    for number in (1, 2):
        gradients = gradients_of(gather(weights["weight"], world_size), weights["bias"], batch)
        weights["weight"] -= LEARNING_RATE * gradients[0].chunk(world_size)[rank]
        weights["bias"] -= LEARNING_RATE * gradients[1]
        for name in [*sharded, *weights]:
            averages[name].lerp_(weights[name], 1 - DECAY)
        for kind, values in (("", weights), ("ema.", averages)):
            tensors[f"step {number}/{kind}weight"] = gather(values["weight"], world_size)
            tensors[f"step {number}/{kind}bias"] = values["bias"].clone()
    return tensors


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
