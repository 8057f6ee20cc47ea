"""Resume in the middle of an epoch, also on another number of ranks.

A checkpoint within an epoch records how many samples of the epoch's permutation all ranks together
have read. Whoever resumes continues with the sample after it. Because every rank draws the same
permutation and takes every W-th position, the position is one number, and W may differ from what it
was: no sample is read twice, and none is left out.
"""

import torch


def remaining_batches(
    samples: int, seed: int, done: int, batch_size: int, rank: int, world_size: int
) -> list[list[int]]:
    """Return the local batches that a rank has still to read in an epoch.

    Args:
        samples: number of samples of the dataset.
        seed: of the generator from which the permutation of this epoch is drawn.
        done: number of samples that all ranks together have read, a multiple of batch_size.
        batch_size: of the GLOBAL batch; the last batch of the epoch may be smaller.
        rank: number of this rank, from 0, in the launch that resumes.
        world_size: number of ranks in the launch that resumes.

    Returns:
        For each remaining global batch the indices of this rank: positions rank, rank + world_size,
        ... of that batch.
    """
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()
    return [
        order[start : start + batch_size][rank::world_size]
        for start in range(done, samples, batch_size)
    ]
