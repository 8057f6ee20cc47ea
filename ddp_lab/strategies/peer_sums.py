"""Sums over two GPUs that write to each other's memory: an all_reduce without a kernel that computes.

NCCL's all_reduce runs on the multiprocessors and slows the matrix multiplications that should hide it. Here the copy engines
transfer, in a stream of their own, and the sum is one addition on each GPU:

    stream of copies    barrier: the peer's slot is free -- copy `own` to the peer's slot -- barrier: the peer's has arrived
    stream of the step  start -- other work -------------------------------------------------- finish: own + slot

Both GPUs add the same two numbers, so they get the same sum. With two ranks every rank sends as much as in any all_reduce.
The slots are symmetric memory of torch, which needs P2P access, and no multicast. A CUDA graph can capture all of it.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

FOUND: "WeakValueDictionary[str, PeerSums]" = WeakValueDictionary()  # by the name of the process group
SMALL = 2**16  # bytes of the smallest slot


class Slot:
    """Memory on each of two GPUs that the other one writes to. Its construction is collective.

    Args:
        size: bytes.
        group: of two ranks.
        device: of this rank.
    """

    def __init__(self, size: int, group: str, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric_memory  # loads hundreds of modules

        self.memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self.handle: Any = symmetric_memory.rendezvous(self.memory, group)
        self.arrived: Any = None  # event of the copy that is under way

    def here(self, like: torch.Tensor) -> torch.Tensor:
        """Return the memory of this rank as a tensor of the shape and dtype of another one."""
        return self.handle.get_buffer(self.handle.rank, like.shape, like.dtype)

    def there(self, like: torch.Tensor) -> torch.Tensor:
        """Return the memory of the other rank as a tensor of the shape and dtype of another one."""
        return self.handle.get_buffer(1 - self.handle.rank, like.shape, like.dtype)


class PeerSums:
    """The sums of a process group of two GPUs.

    A slot is taken by `start` and given back by `finish`, in the same order on both ranks. The peer's slot is free when the
    peer has begun the same sum, because what it has queued before has read the slot.

    Args:
        group: of two ranks.
        device: of this rank.

    Raises:
        RuntimeError: the GPUs do not reach each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self.stream = torch.cuda.Stream(device, priority=-1)
        # By their size. Captured graphs use them as long as this object lives.
        self._free = {SMALL: [Slot(SMALL, group.group_name, device)]}
        self._taken: dict[int, Slot] = {}  # by the address of what is summed

    def start(self, own: torch.Tensor) -> None:
        """Begin to copy a contiguous tensor to the other rank. It must not be freed or changed before `finish`."""
        size = max(SMALL, 1 << (own.nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        slot = free.pop() if free else Slot(size, self.group.group_name, self.device)
        self._taken[own.data_ptr()] = slot
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            slot.handle.barrier(channel=0)
            slot.there(own).copy_(own, non_blocking=True)
            slot.handle.barrier(channel=0)
            slot.arrived = torch.cuda.Event()
            slot.arrived.record(self.stream)

    def finish(self, own: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum of a tensor, which `start` got, and that of the other rank to `out`."""
        slot = self._taken.pop(own.data_ptr())
        torch.cuda.current_stream(self.device).wait_event(slot.arrived)
        torch.add(own, slot.here(own), out=out)
        self._free[slot.memory.nbytes].append(slot)


def find(group: dist.ProcessGroup, device: torch.device) -> PeerSums | None:
    """Return the sums of a group, or None if it is no pair of GPUs that reach each other's memory. Collective.

    The caller keeps it as long as it sums.
    """
    ranks = dist.get_process_group_ranks(group)
    if device.type != "cuda" or len(ranks) != 2:
        return None
    found = FOUND.get(group.group_name)
    if found is not None and found.group is group:
        return found
    made, works = None, 1.0
    try:
        made = PeerSums(group, device)
    except (RuntimeError, ImportError):  # the GPUs are in two machines, or the driver gives no access
        works = 0.0
    agreed = torch.tensor(works, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    if made is None or not agreed.item():
        return None
    FOUND[group.group_name] = made
    return made


@torch.library.custom_op("ddp_lab::start_peer_sum", mutates_args=())
def start(own: torch.Tensor, group: str) -> torch.Tensor:
    """Begin a sum of the group. Return an empty tensor, which orders `finish` after it."""
    FOUND[group].start(own)
    return own.new_empty(0)


@start.register_fake
def _(own: torch.Tensor, group: str) -> torch.Tensor:
    return own.new_empty(0)


@torch.library.custom_op("ddp_lab::finish_peer_sum", mutates_args=())
def finish(own: list[torch.Tensor], started: list[torch.Tensor], group: str) -> torch.Tensor:
    """Return the sums of contiguous tensors, concatenated along the first dimension.

    Args:
        own: what `start` got.
        started: what it has returned.
    """
    rows = sum(len(each) for each in own)
    sums = own[0].new_empty(rows, *own[0].shape[1:])
    for each, out in zip(own, sums.split([len(each) for each in own]), strict=True):
        FOUND[group].finish(each, out)
    return sums


@finish.register_fake
def _(own: list[torch.Tensor], started: list[torch.Tensor], group: str) -> torch.Tensor:
    return own[0].new_empty(sum(len(each) for each in own), *own[0].shape[1:])
