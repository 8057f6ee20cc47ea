"""The runtime of a rank that has not been started: strategies decide with it which rank would hold what."""

from collections.abc import Callable
from datetime import timedelta

import torch

from ddp_lab.world.ranks import Answer
from ddp_lab.world.runtime import Runtime


class PlannedRuntime(Runtime):
    """Rank and devices of a launch that is only planned. It answers questions by itself, and cannot open a process group.

    Args:
        world_size: number of ranks.
        per_node: number of ranks, or of GPUs, of each machine.
        precision: "float32" or "bf16".
        rank: which of the ranks it is.
        gpus: number of GPUs that the strategies of one process may use.
        free: free bytes of each GPU before the run, on which speed=auto depends.
    """

    def __init__(self, world_size: int, per_node: int, precision: str, rank: int = 0, gpus: int = 1, free: int = 0):
        self.rank, self.world_size = rank, world_size
        self.local_rank, self.local_world_size = rank % per_node, min(per_node, world_size)
        self.precision, self.timeout = precision, timedelta(seconds=600)
        self.devices = [torch.device("cuda", index) for index in range(gpus)]
        self.device = torch.device("cuda", self.local_rank)
        self.free = free

    def free_memory(self) -> int:
        return self.free

    def agree(self, key: str, decide: Callable[[], Answer], per_node: bool = False) -> Answer:
        return decide()

    def collect(self, key: str, value: str) -> list[str] | None:
        return [value]

    def open_group(self) -> None:
        raise AssertionError("a planned launch has no ranks to connect")
