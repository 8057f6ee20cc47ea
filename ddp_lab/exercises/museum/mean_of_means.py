"""Gradients of a classifier of tokens, whose sequences have different lengths.

The sequences of the global batch are divided over the ranks. Padding has the mask 0.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

SEQUENCES = 8
LENGTH = 6
FEATURES = 5
CLASSES = 4


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([1, 2, 2, 3, 4, 5, 6, 6])
    shape = (SEQUENCES, LENGTH, FEATURES)
    return {
        "inputs": torch.randn(shape, generator=generator, dtype=torch.float64),
        "targets": torch.randint(CLASSES, (SEQUENCES, LENGTH), generator=generator),
        "mask": torch.arange(LENGTH) < lengths.unsqueeze(1),
    }


def token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    outputs = model(batch["inputs"]).flatten(0, 1)
    losses = cross_entropy(outputs, batch["targets"].flatten(), reduction="none")
    mask = batch["mask"].flatten()
    return (losses * mask).sum() / mask.sum()


def step(rank: int, world_size: int, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    own_batch = {name: tensor.chunk(world_size)[rank] for name, tensor in batch.items()}
    token_loss(model, own_batch).backward()
    for parameter in model.parameters():
        if world_size > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
    return {name: parameter.grad for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
