"""Compute a weighted mean whose elements are spread over the ranks unequally.

Pixels, tokens and a partial last batch give the ranks different numbers of elements, and the
elements have weights: an ignored pixel has weight 0. A metric is right on any number of ranks if it
is made of SUMS, which are added over the ranks once, and divided once at the end. A rank without
any element takes part as well.
"""

import torch
import torch.distributed as dist


def weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> float:
    """Return sum(weights * values) / sum(weights) over the elements of all ranks.

    Args:
        values: float64 [local elements]; may be empty.
        weights: float64 [local elements], at least 0.

    Returns:
        The mean, the same on all ranks; 0.0 if all weights are 0.
    """
    sums = torch.stack([(values * weights).sum(), weights.sum()])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1]) if sums[1] > 0 else 0.0
