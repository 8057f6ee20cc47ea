"""Faults on purpose, to see a run survive them: inject=crash@rank=1,step=50.

| kind | what rank R does before step S |
|---|---|
| crash | is killed (SIGKILL), as by a machine that runs out of memory |
| segfault | reads memory that is not its own |
| raise | raises a RuntimeError |
| exit | leaves with exit code 0 |
| hang | stands still for an hour |
| slow | sleeps for three seconds |
| nan | gets a batch of images that are not numbers |
| sigterm | gets SIGTERM, as from a scheduler that wants the machine back |
| disk_full | from then on writes checkpoints to a full disk |

Once in a run: the file `.injected` remembers it over restarts.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from ddp_lab.config.faults import parse
from ddp_lab.data.sharding import Loader
from ddp_lab.resilience.checkpoint import Checkpoints
from ddp_lab.resilience.checkpoint_files import write_whole
from ddp_lab.training.speed.cuda_graph import GraphStep
from ddp_lab.training.step import Step
from ddp_lab.training.tally import Tally


class Fault:
    """A `TrainStep` that takes the steps of another one, and makes the fault at one of them.

    Args:
        step: the one that computes, not one that wraps another.
        checkpoints: the run's, whose disk can be made a full one.
        taken: optimizer steps that the run has behind it.
    """

    def __init__(self, step: Step | GraphStep, word: str, rank: int, run_dir: Path, checkpoints: Checkpoints, taken: int):
        self.step, self.run_dir, self.checkpoints, self.taken = step, run_dir, checkpoints, taken
        kind, faulty, at = parse(word)
        self.kind, self.at = kind, at if faulty == rank else None
        self.word = word

    @property
    def tally(self) -> Tally:
        return self.step.tally

    @property
    def lr(self) -> float:
        return self.step.lr

    def batches(self, loader: Loader) -> Iterable[Any]:
        return self.step.batches(loader)

    def __call__(self, batch: Any) -> None:
        self.taken += 1
        done = self.run_dir / ".injected"
        if self.taken == self.at and not (done.exists() and self.word in done.read_text()):
            with done.open("a") as file:
                file.write(self.word + "\n")
            getattr(self, f"_{self.kind}")(batch)
        else:
            self.step(batch)

    def _crash(self, batch):
        os.kill(os.getpid(), signal.SIGKILL)

    def _segfault(self, batch):
        ctypes.string_at(0)

    def _raise(self, batch):
        raise RuntimeError(f"injected by inject={self.word}")

    def _exit(self, batch):
        sys.stdout.flush()
        os._exit(0)

    def _hang(self, batch):
        time.sleep(3600)

    def _slow(self, batch):
        time.sleep(3)
        self.step(batch)

    def _nan(self, batch):
        batch = self.step.gather(batch)
        self.step(batch._replace(inputs=batch.inputs * float("nan")))

    def _sigterm(self, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        self.step(batch)

    def _disk_full(self, batch):
        self.checkpoints.write = partial(write_whole, temporary=Path("/dev/full"))
        self.step(batch)
