"""The rank of a launch that is only planned: its place and a fake process group.

It has bf16 as on a GPU.
"""

import copy
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ddp_lab.world.device import half_dtype
from ddp_lab.world.ranks import Answer
from ddp_lab.world.runtime import Runtime


class PlannedRuntime(Runtime):
    """A rank of a launch that is only planned.

    It answers questions by itself, and its process group sends nothing.

    Args:
        world_size: number of ranks.
        per_node: number of ranks, or of GPUs, of each machine.
        precision: "float32", "bf16" or "fp16".
        gpus: number of GPUs that the strategies of one process may use.
        kind: "cuda" or "cpu", for which strategies and options decide; tensors are fake ones of the
            CPU in any case.

    Attributes:
        free: free bytes of each GPU before the run, on which speed=auto depends.
    """

    is_planned = True

    def __init__(
        self, world_size: int, per_node: int, precision: str, gpus: int = 1, kind: str = "cuda"
    ):
        self.rank = 0
        self.world_size = world_size
        self.local_rank = 0
        self.local_world_size = min(per_node, world_size)
        self.precision = precision
        self.half = half_dtype(precision)
        self.timeout = timedelta(seconds=600)
        self.kind = kind
        self.free = 0
        self._meshes = {}
        self._kept = []
        self.devices = [torch.device(kind, index) for index in range(gpus)]
        self.device = self.devices[0] if kind == "cuda" else torch.device(kind)

    def of_rank(self, rank: int) -> "PlannedRuntime":
        """Return another rank of the launch."""
        other = copy.copy(self)
        other.rank = rank
        other.local_rank = rank % self.local_world_size
        other._meshes = {}
        other._kept = []
        return other

    def free_memory(self) -> int:
        return self.free

    def broadcast_from_rank0(
        self, key: str, decide: Callable[[], Answer], per_node: bool = False
    ) -> Answer:
        return decide()

    def gather_objects(self, key: str, value: str) -> list[str] | None:
        return [value]

    def on_any_rank(self, here: bool) -> bool:
        return here

    def open_group(self) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(
            "fake", rank=self.rank, world_size=self.world_size, store=FakeStore()
        )

    @contextmanager
    def autocast(self) -> Generator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", self.half, enabled=self.half is not None))
            if self.half is not None and self.kind == "cuda":
                stack.enter_context(Float32Norms())
            yield


class Float32Norms(TorchFunctionMode):
    """Lets layer normalizations and softmax compute in float32, as autocast does on CUDA only."""

    functions = (F.layer_norm, F.group_norm, F.softmax, F.log_softmax)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in self.functions:
            args, kwargs = tree_map_only(
                torch.Tensor, lambda tensor: tensor.float(), (args, kwargs)
            )
        return func(*args, **kwargs or {})
