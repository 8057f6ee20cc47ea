"""Sum many gradients over the ranks in a few collectives.

Every collective pays a latency, whatever its size: a network with 62 small gradients pays it 62
times. So gradients are put into buckets, in the reverse order of the parameters, in which a
backward pass completes them. Each bucket is flattened into one tensor, summed by one all-reduce,
and copied back.

    gradients (elements)   2 3 | 4 1 | 6      limit 5, from the right: [6] [1 4] [3 2]
"""

import torch
import torch.distributed as dist


def fill_buckets(sizes: list[int], limit: int) -> list[list[int]]:
    """Put gradients into buckets, the last gradient first.

    A bucket is closed when the next gradient would exceed the limit. A gradient above the limit
    gets a bucket of its own.

    Args:
        sizes: number of elements of each gradient, in the order of the parameters.
        limit: largest number of elements in a bucket.

    Returns:
        The indices of the gradients of each bucket; the first bucket begins with the last gradient.
    """
    buckets: list[list[int]] = []
    for index in reversed(range(len(sizes))):
        if buckets and sum(sizes[each] for each in buckets[-1]) + sizes[index] <= limit:
            buckets[-1].append(index)
        else:
            buckets.append([index])
    return buckets


def all_reduce_buckets(gradients: list[torch.Tensor], limit: int) -> None:
    """Replace each gradient by its sum over all ranks, in place, one dist.all_reduce per bucket.

    Args:
        gradients: tensors of any shape, in the order of the parameters.
        limit: largest number of elements in a bucket.
    """
    for bucket in fill_buckets([gradient.numel() for gradient in gradients], limit):
        flat = torch.cat([gradients[index].flatten() for index in bucket])
        dist.all_reduce(flat)
        sums = flat.split([gradients[index].numel() for index in bucket])
        for index, summed in zip(bucket, sums, strict=True):
            gradients[index].copy_(summed.view_as(gradients[index]))
