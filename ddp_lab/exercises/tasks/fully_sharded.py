"""Shard the weights, too: gather, compute, scatter.

In ZeRO-3, which torch's fully_shard implements, a rank keeps only its own rows of each weight.
Before a layer computes, the ranks gather the whole weight; after its backward pass each rank needs
only the SUM over the ranks of its own rows of the gradient, which a reduce-scatter gives it. The
whole weight and the whole gradient are freed at once.

    own rows of the weight --all_gather--> the whole weight --forward, backward-->
        gradient of the local batch --reduce_scatter--> own rows of the sum
"""

import torch
import torch.distributed as dist


def gather(shard: torch.Tensor) -> torch.Tensor:
    """Return the whole weight.

    Args:
        shard: [rows / world_size, columns], the rows of this rank; rank 0 has the first ones.

    Returns:
        [rows, columns]
    """
    rows = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, shard)
    return torch.cat(rows)


def gradient_of_own_rows(
    shard: torch.Tensor, inputs: torch.Tensor, global_batch_size: int
) -> torch.Tensor:
    """Return this rank's rows of the gradient of the mean loss over the global batch.

    The layer computes inputs @ weight.T; the loss of a sample is half the sum of the squares of its
    outputs.

    Args:
        shard: [rows / world_size, columns], the rows of this rank.
        inputs: [local samples, columns].
        global_batch_size: number of samples of all ranks.

    Returns:
        [rows / world_size, columns], summed over the ranks.
    """
    weight = gather(shard)
    outputs = inputs @ weight.T
    gradient = outputs.T @ inputs / global_batch_size
    summed = torch.empty_like(shard)
    dist.reduce_scatter_tensor(summed, gradient)
    return summed
