"""Five algorithms that sum the gradients over the ranks. Afterwards every rank has the sums.

With W ranks and n bytes of gradients:

| algorithm | bytes that a rank sends, and receives | messages | |
|---|---|---|---|
| star | rank 0: (W-1) n; others: n | two collectives per tensor | rank 0 gathers, adds and sends |
| per_tensor | 2 n (W-1)/W | one collective per tensor | |
| flat | 2 n (W-1)/W | one collective | |
| ring | 2 n (W-1)/W | 2 (W-1) per rank | the library's ring, written with send and receive |
| bucketed | 2 n (W-1)/W | one collective per bucket | runs during the backward pass (buckets.py) |

2 n (W-1)/W is the least that an all-reduce can send (Patarasuk and Yuan 2009, "Bandwidth optimal
all-reduce algorithms for clusters of workstations").
"""

import pkgutil
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist

from ddp_lab.config.errors import ConfigError
from ddp_lab.strategies.contiguous import flatten, in_memory_order, unflatten


def star(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sum each gradient on rank 0 and broadcast the sum, in place.

    Rank 0's link carries all the traffic.

    This is the all-reduce of Dive into Deep Learning, section 13.5, with processes in place of
    devices.
    """
    for gradient in map(in_memory_order, gradients):
        from_ranks = None
        if dist.get_rank() == 0:
            from_ranks = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.gather(gradient, from_ranks, dst=0)
        if from_ranks is not None:
            gradient.copy_(torch.stack(from_ranks).sum(0))
        dist.broadcast(gradient, src=0)
    return gradients


def per_tensor(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sum each gradient in its own collective, in place.

    Each collective pays the latency: 8 for LeNet, 62 for ResNet-18.
    """
    for gradient in gradients:
        dist.all_reduce(in_memory_order(gradient))
    return gradients


def flat(
    gradients: list[torch.Tensor], group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Sum all gradients in one collective, which pays the latency once and costs one copy.

    Return views of the sums.
    """
    flattened = flatten(gradients)
    dist.all_reduce(flattened, group=group)
    return unflatten(flattened, gradients)


def ring(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sum all gradients by passing chunks around a ring of ranks. Return views of the sums.

    The gradients are cut into W chunks. In every round each rank sends one chunk to its right
    neighbour and receives one from its left neighbour, so all links are busy at once.

        reduce-scatter, W-1 rounds: each rank adds the chunk it receives to its own chunk
        all-gather,     W-1 rounds: the complete sums, one per rank, are passed on to all ranks
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    flattened = flatten(gradients)
    padded = torch.cat([flattened, flattened.new_zeros(-len(flattened) % world_size)])
    chunks = padded.chunk(world_size)
    received = torch.empty_like(chunks[0])

    def exchange(send: int, into: torch.Tensor) -> None:
        sending = dist.P2POp(dist.isend, chunks[send % world_size], right)
        receiving = dist.P2POp(dist.irecv, into, left)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()

    for step in range(world_size - 1):
        exchange(rank - step, received)
        chunks[(rank - step - 1) % world_size].add_(received)
    for step in range(world_size - 1):
        exchange(rank - step + 1, chunks[(rank - step) % world_size])
    return unflatten(padded[: len(flattened)], gradients)


# Returns the sums of gradients over all ranks, as new tensors or in place. Collective.
Algorithm = Callable[[list[torch.Tensor]], list[torch.Tensor]]

# Those that run after the backward pass.
ALGORITHMS: dict[str, Algorithm] = {
    "star": star,
    "per_tensor": per_tensor,
    "flat": flat,
    "ring": ring,
}


def find_algorithm(name: str) -> Algorithm:
    """Return an algorithm of ALGORITHMS, or the function of a dotted name such as mine.tree.

    Raises:
        ConfigError: there is no such function.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    allowed = (
        f"must be {', '.join(ALGORITHMS)} or bucketed, or the name of a function that Python can "
        "import, for example mine.tree from a file mine.py in the current directory"
    )
    try:
        function = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"strategy.algorithm={name}: {allowed} ({error})") from None

    if not callable(function):
        raise ConfigError(
            f"strategy.algorithm={name}: {allowed}; it is a {type(function).__name__}"
        )
    return cast("Algorithm", function)
