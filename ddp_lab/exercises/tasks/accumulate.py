"""Accumulate gradients over micro-batches, and sum them over the ranks once.

A batch that does not fit into memory is computed in micro-batches, whose gradients add up in
`parameter.grad`. The ranks need the sum only after the last one: an all-reduce after each costs as
many times the communication, and one of gradients that were summed before counts them again. DDP's
no_sync() exists for this.
"""

import torch
import torch.distributed as dist
from torch import nn


def accumulated_step(
    model: nn.Module, micro_batches: list[torch.Tensor], global_batch_size: int
) -> None:
    """Leave in each parameter's .grad the gradient of the mean loss over the global batch.

    The loss of a sample is the sum of the model's outputs for it. Gradients that are there before
    are those of the last step.

    Args:
        model: the same weights on all ranks.
        micro_batches: of this rank, each [samples, features].
        global_batch_size: number of samples in all micro-batches of all ranks.
    """
    model.zero_grad()
    for micro_batch in micro_batches:
        loss = model(micro_batch).sum() / global_batch_size
        loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
