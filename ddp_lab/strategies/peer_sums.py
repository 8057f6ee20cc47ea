"""Sums over two GPUs writing to each other's memory: collectives without a kernel that computes.

NCCL's all_reduce runs on the multiprocessors and slows the matrix multiplications that should hide
it. Here the copy engines transfer, in a stream of their own, and the sum is one addition on each
GPU:

    stream of copies    copy `own` to the peer's slot -- barrier: the peer's has arrived
    stream of the step  start -- other work ------------------------- finish: own + slot

Both GPUs add the same two numbers, so they get the same sum. With two ranks every rank sends as
much as in any all_reduce. Where the ranks share the tokens, a rank sends the peer's half of what is
summed (reduce_scatter), or its own tokens (all_gather). The slots are symmetric memory of torch,
which needs P2P access, and no multicast. A CUDA graph can capture all of it.

The operations by which a model uses it are in peer_sum_ops.py.
"""

from collections import Counter
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

# by the name of the process group
SUMS_OF_GROUPS: "WeakValueDictionary[str, PeerSums]" = WeakValueDictionary()
SMALL = 2**16  # bytes of the smallest slot
MOST = 4  # slots of one size, unless more sums are under way: two chunks of two consecutive sums


class Slot:
    """Memory on each of two GPUs that the other one writes to. Its construction is collective.

    Args:
        size: bytes.
        group: of two ranks.
        device: of this rank.
    """

    def __init__(self, size: int, group: str, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric_memory  # loads hundreds of modules

        # Torch up to 2.11 clears the flags of barriers and copies the addresses of both memories
        # in the default stream, without a wait, but takes memory for them from the current one:
        # what is queued there could still write to it, and a barrier then read other addresses.
        stream = torch.cuda.default_stream(device)
        with torch.cuda.stream(stream):
            self.memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
            stream.synchronize()
            self.handle: Any = symmetric_memory.rendezvous(self.memory, cast("Any", group))  # name
            stream.synchronize()
        self.arrived: Any = None  # event of the copy that is under way

    def here(self, like: torch.Tensor) -> torch.Tensor:
        """Return the memory of this rank as a tensor of the shape and dtype of another one."""
        return self.handle.get_buffer(self.handle.rank, like.shape, like.dtype)

    def there(self, like: torch.Tensor) -> torch.Tensor:
        """Return the memory of the other rank as a tensor of the shape and dtype of another one."""
        return self.handle.get_buffer(1 - self.handle.rank, like.shape, like.dtype)


class PeerSums:
    """The sums of a process group of two GPUs.

    A slot is taken by `start` and given back by `finish`, in the same order on both ranks. A slot
    is free on the other rank, too, as soon as that rank has begun a sum after it gave the slot
    back: then all that read the slot has ended there. The barrier of any sum proves this for all
    slots that were free when it began, so with several slots one barrier for each sum is enough.

    Args:
        group: of two ranks.
        device: of this rank.

    Raises:
        RuntimeError: the GPUs do not reach each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group = group
        self.rank = group.rank()
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        # By their size. Captured graphs use them as long as this object lives.
        self._free = {SMALL: [Slot(SMALL, group.group_name, device)]}
        self._taken: dict[int, Slot] = {}  # by the address of what is summed
        self._made: Counter[int] = Counter()
        self._ready: set[Slot] = set()  # free slots that are free on the other rank, too

    def begin(self) -> None:
        """Begin a forward pass.

        A CUDA graph may begin here, which does not know what was replayed before it.
        """
        self._ready.clear()

    def start(self, sent: torch.Tensor) -> None:
        """Begin to copy a contiguous tensor to the other rank.

        It must not be freed or changed before `add` or `receive`.
        """
        slot = self._take(max(SMALL, 1 << (sent.nbytes - 1).bit_length()))
        self._taken[sent.data_ptr()] = slot
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            if slot not in self._ready:
                slot.handle.barrier(channel=0)
            slot.there(sent).copy_(sent, non_blocking=True)
            slot.handle.barrier(channel=0)
            slot.arrived = torch.cuda.Event()
            slot.arrived.record(self.stream)
        self._ready = {free for slots in self._free.values() for free in slots}

    def _take(self, size: int) -> Slot:
        """Take a free slot: one that is ready, or a new one, which is, if there are few."""
        free = self._free.setdefault(size, [])
        ready = [slot for slot in free if slot in self._ready]
        capturing = torch.cuda.is_current_stream_capturing()
        if not ready and (not free or (self._made[size] < MOST and not capturing)):
            slot = Slot(size, self.group.group_name, self.device)
            self._made[size] += 1
            self._ready.add(slot)
            return slot
        slot = (ready or free)[0]
        free.remove(slot)
        return slot

    def add(self, sent: torch.Tensor, addend: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum of a tensor and what the other rank has sent to `out`.

        Args:
            sent: what `start` got.
            addend, out: of its shape.
        """
        slot = self._wait_for(sent)
        torch.add(addend, slot.here(sent), out=out)
        self._give_back(slot)

    def receive(self, sent: torch.Tensor, out: torch.Tensor) -> None:
        """Write what the other rank has sent to `out`. Arguments as for `add`."""
        slot = self._wait_for(sent)
        out.copy_(slot.here(sent))
        self._give_back(slot)

    def _wait_for(self, sent: torch.Tensor) -> Slot:
        """Let the current stream wait for what the other rank sends in place of a tensor."""
        slot = self._taken.pop(sent.data_ptr())
        torch.cuda.current_stream(self.device).wait_event(slot.arrived)
        return slot

    def _give_back(self, slot: Slot) -> None:
        """Make a slot free on this rank once the current stream has read it."""
        self._free[slot.memory.nbytes].append(slot)


def find(group: dist.ProcessGroup, device: torch.device) -> PeerSums | None:
    """Return the sums of a group, or None if it is no pair of GPUs that reach each other's memory.

    Collective.

    The caller keeps it until the group closes, because a rank that finds it again would not take
    part in making another.
    """
    ranks = dist.get_process_group_ranks(group)
    if device.type != "cuda" or len(ranks) != 2:
        return None
    known_sums = SUMS_OF_GROUPS.get(group.group_name)
    if known_sums is not None and known_sums.group is group:
        return known_sums

    new_sums = None
    works = 1.0
    try:
        new_sums = PeerSums(group, device)
    # the GPUs are in two machines, or the driver gives no access
    except (RuntimeError, ImportError):
        works = 0.0

    agreed = torch.tensor(works, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    if new_sums is None or not agreed.item():
        return None
    SUMS_OF_GROUPS[group.group_name] = new_sums
    return new_sums
