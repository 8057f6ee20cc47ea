"""Sum a tensor over the ranks by passing chunks around a ring.

In a star, rank 0's link carries everybody's data. In a ring all links are busy at once: each rank
only sends to its right neighbour and receives from its left one. The tensor is cut into W chunks of
about equal length, and every rank sends 2 (W-1)/W of the tensor, which is the least that an
all-reduce can send (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters
of workstations").

    reduce-scatter, W-1 steps: in step s rank r sends chunk r-s and adds what it receives to its
                               chunk r-s-1 (modulo W). Afterwards rank r has the complete sum of
                               chunk r+1.
    all-gather,     W-1 steps: in step s rank r sends chunk r-s+1, which is complete, and receives
                               chunk r-s.
"""

import torch
import torch.distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Replace a tensor by its sum over all ranks, in place.

    Use dist.isend and dist.irecv (or dist.send and dist.recv) only.

    Args:
        tensor: [n], of the same length on all ranks; n need not be a multiple of the number of
            ranks.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    chunks = list(tensor.tensor_split(world_size))

    def exchange(send: int, receive: int) -> torch.Tensor:
        received = torch.empty_like(chunks[receive % world_size])
        sending = dist.isend(chunks[send % world_size], right)
        dist.recv(received, left)
        sending.wait()
        return received

    for step in range(world_size - 1):
        received = exchange(rank - step, rank - step - 1)
        chunks[(rank - step - 1) % world_size] += received
    for step in range(world_size - 1):
        received = exchange(rank - step + 1, rank - step)
        chunks[(rank - step) % world_size].copy_(received)
