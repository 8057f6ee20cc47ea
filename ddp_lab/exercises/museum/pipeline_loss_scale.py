"""Gradients of a chain of layers that is cut into stages, one for each rank (GPipe).

All micro-batches go forward through the stages, then all go backward. One rank is the reference: it
computes the batch at once.
"""

import torch
import torch.distributed as dist
from torch import nn

LAYERS = 4
WIDTH = 6
MICRO_BATCHES = 8


def make_batch() -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def receive(shape: torch.Size, source: int) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=torch.float64)
    dist.recv(tensor, source)
    return tensor


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs - 1).square().mean()


def step(rank: int, world_size: int, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(LAYERS)]
    numbers = range(rank * LAYERS // world_size, (rank + 1) * LAYERS // world_size)
    stage = nn.Sequential(*[part for n in numbers for part in (layers[n], nn.Tanh())])
    is_last = rank == world_size - 1

    entered = []
    left = []
    for micro_batch in batch.chunk(MICRO_BATCHES if world_size > 1 else 1):
        inputs = micro_batch if rank == 0 else receive(micro_batch.shape, rank - 1)
        inputs.requires_grad_(rank > 0)
        outputs = stage(inputs)
        if not is_last:
            dist.send(outputs.detach(), rank + 1)
        entered.append(inputs)
        left.append(outputs)

    for inputs, outputs in zip(entered, left, strict=True):
        if is_last:
            loss_of(outputs).backward()
        else:
            outputs.backward(receive(outputs.shape, rank + 1))
        if rank > 0:
            dist.send(inputs.grad, rank - 1)
    own_layers = [(n, layers[n]) for n in numbers]
    return {
        f"{n}.{name}": p.grad for n, layer in own_layers for name, p in layer.named_parameters()
    }


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
