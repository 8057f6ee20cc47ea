"""Split a global batch over the ranks.

Every data-parallel step begins here: W ranks get the same global batch of samples and each computes
a part of it, its local batch. Rank r takes the samples at the positions r, r + W, r + 2W, ..., as
torch's DistributedSampler does. Every sample is computed exactly once, also if W does not divide
the size of the batch.

    global batch of 5      a b c d e
    rank 0 of 2            a   c   e
    rank 1 of 2              b   d
"""

import torch


def local_batch(global_batch: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return the samples of one rank.

    Args:
        global_batch: [samples, ...], the same on all ranks.
        rank: number of this rank, from 0.
        world_size: number of ranks.

    Returns:
        [local samples, ...]; sizes of two ranks differ by at most one.
    """
    return global_batch[rank::world_size]
