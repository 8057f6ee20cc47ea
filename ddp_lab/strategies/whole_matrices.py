"""Functions of complete matrices of which the ranks hold shards, each computed by one rank.

Of as many matrices as there are ranks each rank gets one, by an all-to-all of the shards, and
returns the shards of the result by another one:

    rank 0 has  A0 B0           A0 A1 --> f(A)          A0 B0
    rank 1 has  A1 B1   --->    B0 B1 --> f(B)   --->   A1 B1
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab.strategies.dtensor import local, shard_like

OfMatrix = Callable[[torch.Tensor], torch.Tensor]


def of_complete(
    matrices: Sequence[torch.Tensor], function: OfMatrix, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return this rank's shards of a function of complete matrices. Collective if there are shards.

    Args:
        matrices: complete ones, for which every rank calls the function; or DTensors, in the same
            order on all ranks that share them.
        function: returns a matrix of the same shape.
        dtype: of what it returns.
    """
    results: list[torch.Tensor | None] = [None] * len(matrices)
    by_group: dict[Any, list[int]] = {}
    for place, matrix in enumerate(matrices):
        dim = shard_dim(matrix)
        if not hasattr(matrix, "placements"):
            results[place] = function(matrix)
        elif dim is None:
            results[place] = of_any_layout(matrix, function)
        else:
            mesh: Any = matrix.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
            by_group.setdefault((mesh, dim), []).append(place)

    for (mesh, dim), places in by_group.items():
        ranks = mesh.size()
        for first in range(0, len(places), ranks):
            several = places[first : first + ranks]
            shards = once_for_each(
                [matrices[place] for place in several], dim, mesh.get_group(), function, dtype
            )
            for place, shard in zip(several, shards, strict=True):
                results[place] = shard
    return [result for result in results if result is not None]


def shard_dim(matrix: torch.Tensor) -> int | None:
    """Return the dimension along which the ranks of one mesh dimension share a matrix, or None."""
    placements: Any = getattr(matrix, "placements", ())
    if len(placements) == 1 and type(placements[0]).__name__ == "Shard":
        return placements[0].dim
    return None


def of_any_layout(matrix: Any, function: OfMatrix) -> torch.Tensor:
    """Return this rank's shard of a function of a DTensor, which every rank computes. Collective.

    Args:
        matrix: of any mesh and placements, such as copies of shards.
        function: as of `of_complete`.
    """
    return local(shard_like(function(matrix.full_tensor()), matrix))


def once_for_each(
    matrices: Sequence[torch.Tensor],
    dim: int,
    group: dist.ProcessGroup,
    function: OfMatrix,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Return this rank's shards of a function of matrices, each of which one rank computes.

    Collective.

    Args:
        matrices: DTensors, at most as many as the group has ranks; rank i gets number i.
        dim: along which they are divided.
        group: of the ranks that share them.
        function, dtype: as of `of_complete`.
    """
    ranks = dist.get_world_size(group)
    rank = dist.get_rank(group)
    shards = [local(matrix) for matrix in matrices]
    mine = matrices[rank] if rank < len(matrices) else None
    sizes: list[list[int]] = [[0, 0]] * ranks  # shapes of the shards of my matrix
    if mine is not None:
        sizes = [shape_of_shard(mine.shape, dim, ranks, each) for each in range(ranks)]
    received = exchange(shards, [math.prod(size) for size in sizes], group)
    results: list[torch.Tensor] = []
    if mine is not None:
        parts = [part.view(size) for part, size in zip(received, sizes, strict=True)]
        result = function(torch.cat(parts, dim))
        results = [*result.split([size[dim] for size in sizes], dim)]

    lengths = [shard.numel() for shard in shards] + [0] * (ranks - len(shards))
    if not results:
        results = [shards[0].new_empty(0, dtype=dtype)] * ranks
    returned = exchange(results, lengths, group)
    return [part.view(shard.shape) for part, shard in zip(returned, shards, strict=False)]


def shape_of_shard(shape: Sequence[int], dim: int, ranks: int, rank: int) -> list[int]:
    """Return the shape of a rank's shard: the first ranks have rows, ceil(rows / ranks) each."""
    sizes = [*shape]
    most = -(-sizes[dim] // ranks)
    sizes[dim] = max(0, min(most, sizes[dim] - rank * most))
    return sizes


def exchange(
    tensors: Sequence[torch.Tensor], lengths: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Send tensor number i to rank i, and return the flat tensors from all ranks. Collective.

    Args:
        tensors: for the first ranks; the others get none.
        lengths: numbers of elements that each rank sends to this one.
        group: of the ranks.
    """
    ranks = len(lengths)
    sent = torch.cat([tensor.reshape(-1) for tensor in tensors])
    sizes = [tensor.numel() for tensor in tensors] + [0] * (ranks - len(tensors))
    received = sent.new_empty(sum(lengths))
    dist.all_to_all_single(received, sent, [*lengths], sizes, group=group)
    return [*received.split([*lengths])]
