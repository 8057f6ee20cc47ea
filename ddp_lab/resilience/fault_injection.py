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

Each fault is injected once in a run: the file `.injected` in the run directory records it across
restarts.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ddp_lab.checkpoints.files import step_of
from ddp_lab.config.types import parse_fault
from ddp_lab.training.hooks import Hook, Run


class Fault(Hook):
    """The hook that injects a fault before a step.

    Args:
        injection: the config's `inject`, KIND@rank=R,step=S.
        rank: the rank of this process.
        run_dir: the directory in which `.injected` records that the fault was injected.
    """

    def __init__(self, injection: str, rank: int, run_dir: Path):
        parsed = parse_fault(injection)
        assert parsed is not None, "the validation of the config excludes it"
        self.kind, faulty, self.at = parsed
        self.injection = injection
        self.is_here = faulty == rank
        self.done = run_dir / ".injected"
        self.disk_is_full = False

    def on_start(self, run: Run) -> None:
        self.run = run

    def before_step(self, batch: Any) -> Any:
        if not self.is_here or self.run.position.step + 1 != self.at:
            return batch
        before = self.done.read_text().splitlines() if self.done.exists() else []
        if self.injection in before:
            return batch
        with self.done.open("a") as file:
            file.write(self.injection + "\n")
        return self._inject(batch)

    def before_write(self, path: Path) -> None:
        """Fail as any writing of a checkpoint does on a full disk, if it was full at the time.

        A checkpoint of an earlier step is written, however late its writer thread starts.
        """
        if self.disk_is_full and step_of(path) >= self.at:
            Path("/dev/full").write_bytes(b"0")

    def _inject(self, batch: Any) -> Any:
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
                from ddp_lab.data.trees import apply

                gathered = self.run.step.gather(batch)
                return gathered._replace(
                    inputs=apply(lambda tensor: tensor * float("nan"), gathered.inputs)
                )
            case "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            case _:
                self.disk_is_full = True
        return batch
