"""What a step allocates, sends and computes: every operation passes through a dispatch mode that counts.

Storages are counted, not tensors, because views share them. `fully_shard` shrinks the storages of parameters that it frees to
0 bytes, without an operation, so the sizes of such storages are read again where a new peak or a collective begins.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ddp_lab.strategies.sharding import local

# What a rank sends of n bytes among W ranks, with the algorithms that send the least (Patarasuk and Yuan 2009).
SENT: dict[str, Callable[[int, int], float]] = {
    "allreduce": lambda n, w: 2 * n * (w - 1) / w,
    "allgather": lambda n, w: n * (w - 1) / (w + 1),  # n counts the input and the output, which is w times as large
    "reduce_scatter": lambda n, w: n * (w - 1) / (w + 1),
    "alltoall": lambda n, w: n / 2 * (w - 1) / w,
    "broadcast": lambda n, w: n,
    "gather": lambda n, w: n,
    "send": lambda n, w: n,
    "recv": lambda n, w: 0,
}


class Collective(NamedTuple):
    """A kind of call among some ranks.

    Attributes:
        name: of the call, for example "allreduce".
        ranks: the group.
    """

    name: str
    ranks: tuple[int, ...]


class Live(TorchDispatchMode):
    """Bytes in memory now and at the peak of each place, and the collectives and FLOPs since `restart`.

    Attributes:
        place: number of the device of this process that computes now; always 0 unless a strategy drives several.
        now, peak: bytes by place.
        noted: the peak of each place for which `at_peak` was called.
        calls, sent: number of calls, and bytes that this rank sends, by collective.
        flops: FLOPs by place, with torch's formulas (torch.utils.flop_counter), of this rank's shards.
        multiplies: whether a matrix multiplication was among the operations.
        in_flight: storages that a collective read or wrote.
        at_peak: called with a place before it frees the first storage after a new peak.
        after_collective: called after each collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place, self.multiplies = 0, False
        self.sizes: dict[int, tuple[int, int]] = {}
        self.now, self.peak = Counter[int](), Counter[int]()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resized: set[int] = set()  # found in the first step
        self._steps = 0
        self.in_flight: set[int] = set()
        self.at_peak: Callable[[int], None] = lambda place: None
        self.after_collective: Callable[[], None] = lambda: None
        self.restart()

    def restart(self) -> None:
        """Begin a step: the peak is what lives now."""
        gc.collect()
        self._settle(self._storages)
        self._steps += 1
        self.peak, self.noted = Counter(self.now), Counter[int]()
        self.calls, self.sent, self.flops = Counter[Collective](), Counter[Collective](), Counter[int]()

    def track(self, tensors: Iterable[object]) -> None:
        """Count the storages of tensors that lived before, or that an operation returned."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                key, storage = key_of(tensor), local(tensor).untyped_storage()
                size = storage.nbytes()
                if key not in self.sizes:
                    self.sizes[key], self._storages[key] = (self.place, 0), weakref.ref(storage)
                    weakref.finalize(storage, self._free, key)
                if self.sizes[key][1] != size:
                    self._resize(key, size)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls operations on the local shards, which come here again
        out = func(*args, **(kwargs or {}))
        self.track(tree_leaves((args, kwargs, out) if self._resized else out))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.partition("::")[2], args, out)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops[self.place] += formula(*args, **(kwargs or {}), out_val=out)
            self.multiplies |= "mm" in func._schema.name
        return out

    def _count(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        kind = next((kind for kind in SENT if kind in name.replace("all_", "all")), None)
        if kind is None:  # wait, barrier and the like
            return
        tensors = [tensor for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)]
        if kind in ("allgather", "reduce_scatter") and isinstance(out, torch.Tensor) and len(tensors) == 1:
            tensors.append(out)  # of a functional collective
        self.in_flight |= {*map(key_of, tensors)}
        ranks = group_of(args)
        self.calls[Collective(kind, ranks)] += 1
        self.sent[Collective(kind, ranks)] += round(SENT[kind](sum(tensor.nbytes for tensor in tensors), len(ranks)))
        self._settle(self._resized if self._steps > 1 else self._storages)
        self.after_collective()

    def move(self, tensors: Iterable[torch.Tensor], place: int) -> None:
        """Count tensors at another place."""
        for tensor in tensors:
            key = key_of(tensor)
            before, size = self.sizes.get(key, (place, 0))
            self.now[before] -= size
            self.now[place] += size
            self.sizes[key] = place, size

    def _settle(self, keys: Iterable[int]) -> None:
        """Read again the sizes of storages that may have been resized without an operation."""
        for key in list(keys):
            storage = self._storages[key]()
            if storage is not None and storage.nbytes() != self.sizes[key][1]:
                self._resized.add(key)
                self._resize(key, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        place, before = self.sizes[key]
        if size < before:
            self.note(place)
        self.sizes[key] = place, size
        self.now[place] += size - before
        if self.now[place] > self.peak[place]:
            for other in self._resized:
                storage = self._storages[other]()
                if storage is not None and storage.nbytes() < self.sizes[other][1]:
                    owner, held = self.sizes[other]
                    self.sizes[other] = owner, storage.nbytes()
                    self.now[owner] += storage.nbytes() - held
            self.peak[place] = max(self.peak[place], self.now[place])

    def note(self, place: int) -> None:
        """Call `at_peak` if a place has reached a new peak."""
        if self.noted[place] < self.now[place] == self.peak[place]:
            self.noted[place] = self.now[place]
            self.at_peak(place)

    def _free(self, key: int) -> None:
        place, size = self.sizes[key]
        self.note(place)
        del self.sizes[key], self._storages[key]
        self.now[place] -= size
        self._resized.discard(key)
        self.in_flight.discard(key)


def key_of(tensor: torch.Tensor) -> int:
    """Return what identifies the storage of a tensor."""
    return local(tensor).untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def group_of(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the ranks of the group among the arguments of a collective: an object, or the name of a functional one."""
    for argument in reversed(args):
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
        if isinstance(argument, str):
            found = dist.distributed_c10d._resolve_process_group(argument)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportArgumentType]
            return tuple(dist.get_process_group_ranks(found))
    return tuple(range(dist.get_world_size()))
