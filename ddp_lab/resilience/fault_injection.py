"""Fault injection, to test recovery: inject=crash@rank=1,step=50.

| kind | what happens on rank R before step S |
|---|---|
| crash | it is killed by SIGKILL, as by the kernel of a machine that runs out of memory |
| raise | it raises a RuntimeError |
| exit | it exits with code 0 |
| hang | it sleeps for an hour |
| slow | it sleeps for three seconds |
| nan | the images of its batch are NaN |
| sigterm | it receives SIGTERM, as from a scheduler that preempts the job |
| disk_full | from then on, checkpoints are written to a full disk |

Each fault is injected once in a run: the file `.injected` in the run directory records it across restarts.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ddp_lab.checkpoints.checkpoints import Checkpoints
from ddp_lab.config.types import parse_fault
from ddp_lab.data.loader import Loader
from ddp_lab.speed.cuda_graph import GraphStep
from ddp_lab.training.step import Step


def fill_disk() -> None:
    """Fail as any writing does on a full disk."""
    Path("/dev/full").write_bytes(b"0")


class Fault:
    """A `TrainStep` that calls another one and injects a fault before one of its steps.

    Args:
        step: the step that computes, not one that wraps another.
        injection: the config's `inject`, KIND@rank=R,step=S.
        rank: the rank of this process.
        run_dir: the directory in which `.injected` records that the fault was injected.
        checkpoints: the run's checkpoints; the fault disk_full makes writing them fail.
        taken: number of optimizer steps that the run has taken so far.
    """

    def __init__(self, step: Step | GraphStep, injection: str, rank: int, run_dir: Path, checkpoints: Checkpoints, taken: int):
        self.step, self.run_dir, self.checkpoints, self.taken = step, run_dir, checkpoints, taken
        parsed = parse_fault(injection)
        assert parsed is not None, "the validation of the config excludes it"
        self.injection, (self.kind, faulty, at) = injection, parsed
        self.at = at if faulty == rank else None

    def batches(self, loader: Loader) -> Iterable[Any]:
        return self.step.batches(loader)

    def __call__(self, batch: Any) -> None:
        self.taken += 1
        done = self.run_dir / ".injected"
        before = done.read_text().splitlines() if self.taken == self.at and done.exists() else []
        if self.taken == self.at and self.injection not in before:
            with done.open("a") as file:
                file.write(self.injection + "\n")
            self._inject(batch)
        else:
            self.step(batch)

    def _inject(self, batch: Any) -> None:
        match self.kind:
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                sys.stdout.flush()
                os._exit(0)
            case "raise":
                raise RuntimeError(f"injected by inject={self.injection}")
            case "hang":
                time.sleep(3600)
            case "slow":
                time.sleep(3)
            case "nan":
                batch = self.step.gather(batch)
                batch = batch._replace(inputs=batch.inputs * float("nan"))
            case "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            case _:
                self.checkpoints.wait()  # a save of an earlier step succeeds, however late its writer thread starts
                self.checkpoints.before_write = fill_disk
        self.step(batch)
