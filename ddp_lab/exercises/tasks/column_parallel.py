"""Split a linear layer by its outputs: column parallelism.

y = x W^T, and each rank keeps some rows of W, so it computes some of the outputs (columns of y) for
ALL samples. Forward nothing is sent. Backward every rank has the gradient of its own outputs only,
so it finds only a part of the gradient of x, which is the sum over the ranks (Shoeybi et al. 2019,
"Megatron-LM").

           W (4 x 3)          y = x W^T
    rank 0 [rows 0 1]   x ->  [outputs 0 1]
    rank 1 [rows 2 3]   x ->  [outputs 2 3]
"""

import torch
import torch.distributed as dist


def shard(weight: torch.Tensor) -> torch.Tensor:
    """Return the rows of this rank: a block of neighbours, rank 0 has the first.

    Args:
        weight: [outputs, inputs]; world_size divides outputs.
    """
    return weight.chunk(dist.get_world_size())[dist.get_rank()]


def forward(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the outputs of this rank, [samples, outputs / world_size].

    Args:
        x: [samples, inputs], the same on all ranks.
        rows: of this rank, [outputs / world_size, inputs].
    """
    return x @ rows.T


def backward(
    x: torch.Tensor, rows: torch.Tensor, grad_y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x, the same on all ranks, and of the own rows.

    Args:
        x: as in `forward`.
        rows: as in `forward`.
        grad_y: [samples, outputs / world_size], the gradient of this rank's outputs.
    """
    grad_x = grad_y @ rows
    dist.all_reduce(grad_x)
    return grad_x, grad_y.T @ x
