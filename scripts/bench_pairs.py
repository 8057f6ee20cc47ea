"""The bare loop inside of a run of train.py: a task with bare steps before every epoch.

So the two loops alternate every second or so, and drift of the machine meets both. scripts/bench.py
starts such a run and reads what it writes:

    train.py task._target_=scripts.bench_pairs.BesideBare +task.model=lenet +task.steps=20
    +task.out=FILE ...

An epoch's time begins and ends with the task's own calls: it has everything that train.py does
between two bare rounds, also what is recorded and decided at the end of an epoch. Both loops have
the memory that train.py keeps (ddp_lab/world/process.py) and share their processes with its
watchdog, whose looks are therefore in no ratio.
"""

import itertools
import json
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.tasks import Classification  # noqa: E402
from ddp_lab.tasks.base import LossFunction  # noqa: E402
from scripts.bench_loops import bare, wait  # noqa: E402
from scripts.bench_models import MODELS  # noqa: E402

WARM_UP = 2  # rounds
ERROR = 0.05


class Clocks(NamedTuple):
    """The time, and the CPU time of all threads of this process, in seconds."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Clocks":
        """Return what the clocks show."""
        return cls(time.perf_counter(), time.process_time())

    def since(self, earlier: "Clocks") -> "Clocks":
        """Return the seconds since an earlier moment."""
        return Clocks(self.wall - earlier.wall, self.cpu - earlier.cpu)


class BesideBare(Classification):
    """Classification that takes as many steps of the bare loop as an epoch has, before each epoch.

    Args:
        model: of scripts/bench_models.py.
        batch: samples on each rank.
        steps: of an epoch.
        out: file to which rank 0 writes a line for each epoch: the clocks' seconds of the
            bare steps, and those of the epoch before them.
    """

    def __init__(
        self, model: str, batch: int, steps: int, out: str, loss: LossFunction | None = None
    ):
        super().__init__(loss)
        self.settings = Namespace(model=model, batch=batch, steps=steps)
        self.out = Path(out)
        self.step: Callable[[], None] | None = None
        self.ended: Clocks | None = None

    def train(self, mode: bool = True) -> "BesideBare":
        """Take the bare steps, if an epoch begins."""
        super().train(mode)
        if mode and is_connected():
            self.take_bare_steps()
        return self

    def take_bare_steps(self) -> None:
        """Take the steps and write how long they and the epoch before them took."""
        device = torch.device("cpu")
        wait(device)
        begin = Clocks.now()
        ours = self.ended and begin.since(self.ended)
        if self.step is None:
            with torch.random.fork_rng([]):
                self.step = bare(MODELS[self.settings.model], device, self.settings)
            begin = Clocks.now()
        for _ in range(self.settings.steps):
            self.step()
        wait(device)
        row = {"bare": Clocks.now().since(begin), "epoch_before": ours}
        if os.environ.get("RANK", "0") == "0":
            with self.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        wait(device)  # no rank begins with the epoch while another one writes
        self.ended = Clocks.now()


def is_connected() -> bool:
    """Return whether the ranks are connected: before that, a trial of the model has no epochs."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or dist.is_initialized()


def ratios(rows: list[dict[str, Any]], clock: int) -> list[float]:
    """Return the speed of each epoch as a share of that of the bare steps around it.

    The first steps do not count.

    The mean of the bare steps before and after an epoch removes a drift that is linear.

    Args:
        rows: what BesideBare wrote, one for each line.
        clock: 0 for the time, 1 for the CPU time.
    """
    values: list[float] = []
    for before, after in itertools.pairwise(rows[WARM_UP:]):
        if after["epoch_before"]:
            bare_seconds = math.sqrt(before["bare"][clock] * after["bare"][clock])
            values.append(bare_seconds / after["epoch_before"][clock])
    return values


def lower_bound(values: list[float]) -> float:
    """Return the lower 95 % bound of the median, by order statistics for any distribution.

    Of n values the k-th smallest is above the median with the probability of at most k - 1 of n
    throws of a coin.
    """
    count = len(values)
    below = 0.0
    rank = 0
    while below + math.comb(count, rank) / 2**count <= ERROR:
        below += math.comb(count, rank) / 2**count
        rank += 1
    return sorted(values)[max(rank - 1, 0)]
