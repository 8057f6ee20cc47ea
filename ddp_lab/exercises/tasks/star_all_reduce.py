"""Sum a tensor over the ranks through rank 0.

The simplest all-reduce: every rank sends its tensor to rank 0, which adds them and sends the sum
back. It is correct, and slow: rank 0's link carries the tensors of all ranks twice, while the other
links are idle (Dive into Deep Learning, section 13.5, does it between the devices of one process).

    rank 1 --+              +--> rank 1
    rank 2 --+--> rank 0 ---+--> rank 2
    rank 3 --+    adds      +--> rank 3
"""

import torch
import torch.distributed as dist


def star_all_reduce(tensor: torch.Tensor) -> None:
    """Replace a tensor by its sum over all ranks, in place.

    Use dist.send and dist.recv only.

    Args:
        tensor: [n], of the same length on all ranks.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    if rank == 0:
        received = torch.empty_like(tensor)
        for other in range(1, world_size):
            dist.recv(received, other)
            tensor += received
        for other in range(1, world_size):
            dist.send(tensor, other)
    else:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
