"""Gradient of the first batch of each of three epochs, for an estimate of its noise.

The weights do not change meanwhile. The dataset is given as a batch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

SAMPLES = 24
GLOBAL_BATCH = 8
EPOCHS = 3
SEED = 5


def make_batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(13)
    return torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)


def sampler_of(dataset: TensorDataset, rank: int, world_size: int):
    if world_size == 1:
        return RandomSampler(dataset, generator=torch.Generator())
    return DistributedSampler(dataset, world_size, rank, shuffle=True, seed=SEED)


def step(rank: int, world_size: int, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    dataset = TensorDataset(batch)
    sampler = sampler_of(dataset, rank, world_size)
    loader = DataLoader(dataset, GLOBAL_BATCH // world_size, sampler=sampler)
    gradients = {}
    for epoch in range(EPOCHS):
        if isinstance(sampler, RandomSampler):
            sampler.generator.manual_seed(SEED + epoch)
        (samples,) = next(iter(loader))
        model.zero_grad()
        (model(samples) - 1).square().mean().backward()
        for name, parameter in model.named_parameters():
            if world_size > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
            gradients[f"epoch {epoch + 1}/{name}"] = parameter.grad.clone()
    return gradients


if __name__ == "__main__":
    from ddp_lab.proof.foreign import verify

    print(verify(step, make_batch()))
