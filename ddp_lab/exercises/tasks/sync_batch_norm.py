"""Compute the mean and the variance of a batch normalization over the batches of all ranks.

BatchNorm normalizes each channel by its mean and its variance over the batch and the pixels. With
local statistics every rank normalizes by those of its own local batch, so the result depends on the
number of ranks. Synchronized statistics are those of the global batch, as torch.nn.SyncBatchNorm
computes them.

With the sums over all elements of a channel: mean = sum(x) / n, variance = sum((x - mean)^2) / n.
"""

import torch
import torch.distributed as dist


def global_statistics(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the biased variance of each channel over the local batches of all ranks.

    Args:
        inputs: float64 [local samples, channels, height, width]; ranks may have different numbers
            of samples, also none.

    Returns:
        Two tensors [channels], the same on all ranks.
    """
    count = torch.tensor([inputs[:, 0].numel()], dtype=inputs.dtype)
    sums = torch.cat([inputs.sum((0, 2, 3)), count])
    dist.all_reduce(sums)
    mean = sums[:-1] / sums[-1]
    total = sums[-1]
    squares = (inputs - mean[:, None, None]).square().sum((0, 2, 3))
    dist.all_reduce(squares)
    return mean, squares / total
