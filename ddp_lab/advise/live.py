"""What the steps of a training allocate, send and compute.

Every operation passes through a dispatch mode that counts.

Storages are counted, not tensors, because views share them. After each operation the sizes of all
are read again, because `fully_shard` shrinks the storages of parameters that it frees to 0 bytes,
without an operation.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ddp_lab.data.batch import Batch
from ddp_lab.data.trees import apply, leaves
from ddp_lab.run.job import Job
from ddp_lab.strategies.dtensor import local
from ddp_lab.training.optimizer import StepObserver
from ddp_lab.training.trainer import Trainer

STATE = ("parameters", "gradients", "optimizer", "averages", "buffers")
PARTS = (*STATE, "activations", "in flight", "data")

# What a rank sends of n bytes among W ranks, with the algorithms that send the least (Patarasuk and
# Yuan 2009).
SENT: dict[str, Callable[[int, int], float]] = {
    "allreduce": lambda n, w: 2 * n * (w - 1) / w,
    # n counts the input and the output, which is w times as large
    "allgather": lambda n, w: n * (w - 1) / (w + 1),
    "reduce_scatter": lambda n, w: n * (w - 1) / (w + 1),
    "alltoall": lambda n, w: n / 2 * (w - 1) / w,
    "broadcast": lambda n, w: n,
    "gather": lambda n, w: n,
    "send": lambda n, w: n,
    "recv": lambda n, w: 0,
}


class Collective(NamedTuple):
    """A kind of call, for example "allreduce", among some ranks."""

    name: str
    ranks: tuple[int, ...]


class Live(TorchDispatchMode):
    """What lives at the peak of a step, and the collectives and FLOPs of the step.

    Several devices of one process (strategy=split) are numbered places; the only device of others
    is place 0.

    Args:
        job: the run.
        trainer: made of it on fake tensors.

    Attributes:
        calls, sent: number of calls, and bytes that this rank sends, by collective.
        flops: FLOPs by place, with torch's formulas (torch.utils.flop_counter), of this rank's
            shards.
        state_bytes: by kind at each place, when the optimizer's step begins; of a sharded model
            those of the shards.
    """

    def __init__(self, job: Job, trainer: Trainer):
        super().__init__()
        self.job = job
        self.trainer = trainer
        strategy = job.strategy
        self.modules = strategy.modules_by_device
        self.owned = [list(module.parameters()) for module in self.modules]
        self.state_bytes: list[dict[str, int]] = [{} for _ in self.modules]
        self.calls = Counter[Collective]()
        self.sent = Counter[Collective]()
        self.flops = Counter[int]()

        self._data: list[int] = []  # storages of the batch that is recorded
        self._place = 0  # where the operation computes
        self._places: dict[int, int] = {}  # of storages
        self._storages = WeakValueDictionary[int, torch.UntypedStorage]()
        self._in_flight: set[int] = set()  # storages that a collective read or wrote
        # bytes by storage when most lives on a device
        self._peaks: list[dict[int, int]] = [{} for _ in self.modules]
        # of storages in `_peaks` that are not state
        self._kinds: list[dict[int, str]] = [{} for _ in self.modules]

        trainer.optimizer.register_step_pre_hook(StepObserver(self._begin_update))
        trainer.optimizer.register_step_post_hook(StepObserver(self._end_update))
        if len(self.modules) > 1:
            self._follow()

    def _end_update(self) -> None:
        self._place = 0

    def take_steps(self) -> None:
        """Take two steps.

        The first creates the optimizer's state; the second is recorded. Call it within the fake
        mode.
        """
        job = self.job
        size = job.sizes.samples_at_once * job.recipe.step.accumulate
        inputs, targets = job.dataset.train.example(size)
        if job.options.channels_last:
            inputs = apply(
                lambda images: images.contiguous(memory_format=torch.channels_last), inputs
            )

        batch = Batch(inputs, targets, job.sizes.global_batch_size)
        for place in range(len(self.modules)):
            self.track(tensor for tensors in self.state(place).values() for tensor in tensors)
        job.strategy.train()
        self.trainer.eager_step(batch)
        self._locate()
        for counter in (self.calls, self.sent, self.flops):
            counter.clear()

        self._data = [key_of(tensor) for _, tensor in leaves(batch[:2])]
        self.trainer.eager_step(batch)
        # during an update, state can be that of local shards, by other keys
        for place, bytes_by_kind in enumerate(self.state_bytes):
            bytes_by_kind |= {
                kind: nbytes(tensors)
                for kind, tensors in self.state(place).items()
                if kind != "gradients"
            }

    def state(self, place: int) -> dict[str, list[torch.Tensor]]:
        """Return what a device holds by kind; of a sharded model the shards."""
        optimizer = self.trainer.optimizer.state
        ema = self.trainer.ema
        owned = self.owned[place]
        buffers = list(self.modules[place].buffers())
        states = [value for parameter in owned for value in optimizer.get(parameter, {}).values()]
        model_ids = {id(tensor) for tensor in [*owned, *buffers]}
        averages = []
        if ema:
            averages = [
                ema.averages[name]
                for name, tensor in ema.tensors.items()
                if id(tensor) in model_ids
            ]

        return {
            "gradients": [parameter.grad for parameter in owned if parameter.grad is not None],
            "parameters": [*owned],
            "optimizer": [value for value in states if isinstance(value, torch.Tensor)],
            "averages": averages,
            "buffers": buffers,
        }

    def track(self, tensors: Iterable[object]) -> None:
        """Count the storages of tensors."""
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
                continue
            key = key_of(tensor)
            if key not in self._storages:
                self._storages[key] = local(tensor).untyped_storage()
                self._places[key] = self._place
                self._in_flight.discard(key)  # of an earlier storage at this address

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor calls operations on the local shards, which come here again
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        # a question, such as for the device of a tensor: five of six calls
        if func.namespace == "prim":
            return out

        self.track(tree_leaves(out))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.partition("::")[2], args, out)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops[self._place] += formula(*args, **(kwargs or {}), out_val=out)

        if self._data and not func.is_view:
            self._look()
        return out

    def _count(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        kind = next((kind for kind in SENT if kind in name.replace("all_", "all")), None)
        if kind is None:  # wait, barrier and the like
            return
        tensors = [tensor for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)]
        if (
            kind in ("allgather", "reduce_scatter")
            and isinstance(out, torch.Tensor)
            and len(tensors) == 1
        ):
            tensors.append(out)  # of a functional collective
        self._in_flight |= {*map(key_of, tensors)}
        collective = Collective(kind, group_of(args))
        self.calls[collective] += 1
        self.sent[collective] += round(SENT[kind](nbytes(tensors), len(collective.ranks)))

    def _look(self) -> None:
        """Keep the sizes of what lives now, if it is more than ever before in this step."""
        sizes = {key: storage.nbytes() for key, storage in self._storages.items()}
        for place, peak in enumerate(self._peaks):
            here = {key: size for key, size in sizes.items() if self._places[key] == place}
            if sum(here.values()) > sum(peak.values()):
                self._peaks[place] = here
                self._kinds[place] = {}
            # the first operation after the peak, when gradients are where they belong
            elif not self._kinds[place]:
                self._kinds[place] = self._transient(place)

    def _transient(self, place: int) -> dict[int, str]:
        """Return the kinds of storages that do not live as long as the training."""
        # of a sharded model, those that are gathered now
        now = list(self.modules[place].parameters())
        gradients = [
            parameter.grad for parameter in (*self.owned[place], *now) if parameter.grad is not None
        ]
        kinds = dict.fromkeys([*self._in_flight, *map(key_of, now)], "in flight")
        return kinds | dict.fromkeys(map(key_of, gradients), "gradients")

    def peak(self, place: int) -> dict[str, float]:
        """Return the bytes of each kind of PARTS that lived on a device when most did."""
        kinds = self._kinds[place] or self._transient(place)
        kinds |= {
            key_of(tensor): kind
            for kind, tensors in self.state(place).items()
            for tensor in tensors
        }
        kinds |= dict.fromkeys(self._data, "data")
        parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for key, size in self._peaks[place].items():
            parts[kinds.get(key, "activations")] += size
        return parts

    def _locate(self) -> None:
        """Count the tensors on the device of their part of the model."""
        for place in range(len(self.modules)):
            for tensors in self.state(place).values():
                self._places |= dict.fromkeys(map(key_of, tensors), place)

    def _begin_update(self) -> None:
        for place, bytes_by_kind in enumerate(self.state_bytes):
            bytes_by_kind["gradients"] = nbytes(self.state(place)["gradients"])
        self._locate()
        self._place = 0

    def _follow(self) -> None:
        """Let what a part of the model computes be counted on its device."""
        for place, module in enumerate(self.modules):

            def enter(
                module: nn.Module, inputs: tuple[torch.Tensor], place: int = place
            ) -> tuple[torch.Tensor]:
                self._place = place
                # the copy that the device receives
                return (inputs[0].clone(),) if place else inputs

            def leave(
                module: nn.Module, inputs: object, output: torch.Tensor, place: int = place
            ) -> None:
                if output.grad_fn is not None:
                    output.grad_fn.register_prehook(
                        lambda gradients: setattr(self, "_place", place)
                    )

            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)


def key_of(tensor: torch.Tensor) -> int:
    """Return what identifies the storage of a tensor."""
    return local(tensor).untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors; of DTensors those of the local shards."""
    return sum(local(tensor).nbytes for tensor in tensors)


def group_of(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the ranks of the group among the arguments of a collective.

    A group is an object or, of a functional collective, a name.
    """
    for argument in reversed(args):
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
        if isinstance(argument, str):
            group = dist.distributed_c10d._resolve_process_group(argument)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportArgumentType]
            return tuple(dist.get_process_group_ranks(group))
    return tuple(range(dist.get_world_size()))
