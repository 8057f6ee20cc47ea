"""Divide the loss so that summed gradients are those of the mean over the global batch.

Each rank computes the gradient of its own loss, and the gradients are then SUMMED over the ranks.
On one device the loss is the mean over the whole batch. For which loss of a rank is the sum of the
ranks' gradients the gradient of that mean, also if the ranks have local batches of different sizes,
as with 5 samples on 2 ranks?
"""

import torch


def loss_of_rank(losses: torch.Tensor, global_batch_size: int) -> torch.Tensor:
    """Return the loss whose gradients, summed over ranks, are those of the mean over the batch.

    Args:
        losses: [local samples], the loss of each sample of this rank; it may be empty.
        global_batch_size: number of samples of all ranks.

    Returns:
        A scalar with a gradient.
    """
    return losses.sum() / global_batch_size
