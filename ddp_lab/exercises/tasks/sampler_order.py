"""Compute which samples a rank reads in an epoch, in the order of torch's DistributedSampler.

All ranks draw the same permutation, from a generator seeded by the seed and the epoch, and each
takes every W-th position. So step s sees the same samples on any number of ranks. If W does not
divide the number of samples, samples from the beginning of the permutation are repeated at its end,
so that all ranks have equally many.
"""

import torch


def epoch_indices(samples: int, seed: int, epoch: int, rank: int, world_size: int) -> list[int]:
    """Return the indices that a rank reads in an epoch, in order.

    Args:
        samples: number of samples of the dataset, at least world_size.
        seed: the same on all ranks and for all epochs; the generator's seed is seed + epoch.
        epoch: number of the epoch.
        rank: number of this rank, from 0.
        world_size: number of ranks.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(samples, generator=generator).tolist()
    order += order[: -samples % world_size]
    return order[rank::world_size]
