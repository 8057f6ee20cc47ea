"""Split a linear layer by its inputs: row parallelism.

y = x W^T + b, and each rank keeps some columns of W, which belong to some of the inputs. A
column-parallel layer before it leaves each rank just these inputs, so no communication lies between
the two. Each rank computes a part of every output; the outputs are the sum over the ranks. Backward
nothing is sent, because every rank needs the gradients of its own inputs only.

           W (3 x 4)                    x                  y
    rank 0 [columns 0 1]    [inputs 0 1] -> partial sums --+
    rank 1 [columns 2 3]    [inputs 2 3] -> partial sums --+--> all_reduce --> all outputs
"""

import torch
import torch.distributed as dist


def forward(own_x: torch.Tensor, shard: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return all outputs, [samples, outputs], the same on all ranks.

    Args:
        own_x: [samples, inputs / world_size], the inputs of this rank.
        shard: [outputs, inputs / world_size], their columns of the weight.
        bias: [outputs], the same on all ranks.
    """
    y = own_x @ shard.T
    dist.all_reduce(y)
    return y + bias


def backward(
    own_x: torch.Tensor, shard: torch.Tensor, grad_y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the own inputs, of the own columns, and of the bias.

    Args:
        own_x: as in `forward`.
        shard: as in `forward`.
        grad_y: [samples, outputs], the gradient of all outputs, the same on all ranks.
    """
    return grad_y @ shard, grad_y.T @ own_x, grad_y.sum(0)
