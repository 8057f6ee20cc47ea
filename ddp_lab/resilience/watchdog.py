"""The watchdog: heartbeats of all ranks, detection of lost and hanging ranks and nodes, and the report of the first failure.

Each rank writes its heartbeat on the board of its node, and a thread of each rank looks at the board twice a second
(node_watch.py). One rank of each node exchanges its node's heartbeat with the other nodes through the store (node_link.py).
Nothing of this is on a disk that the nodes share. The thread runs even while the main thread waits in a collective for a rank
that never arrives. Only the first failure is reported (failure_report.py). Errors that it causes go to log files.
"""

import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Literal

from ddp_lab.config.errors import ConfigError, FailureKind, SampleError, TrainingError
from ddp_lab.observe.log import LOG_FILES, log
from ddp_lab.resilience import failure_report
from ddp_lab.resilience.failure_report import Others, advice, describe
from ddp_lab.resilience.hang import HangCheck
from ddp_lab.resilience.heartbeat import OwnHeartbeat
from ddp_lab.resilience.node_board import FAILURE, Heartbeat, NodeBoard, memory_folder
from ddp_lab.resilience.node_link import VANISHED, announce, prepare
from ddp_lab.resilience.node_watch import BEAT, NodeWatch, find_dead_neighbour
from ddp_lab.resilience.run_directory import RunDir, write_status
from ddp_lab.resilience.unchanged import Pace
from ddp_lab.training.progress import Progress
from ddp_lab.world.runtime import Runtime

GRACE = 5.0  # seconds for which a rank whose collective failed waits for another rank's report
NODE_GRACE = VANISHED + GRACE  # the same on several nodes, where the cause may be a node that has vanished
STORE_GRACE = 3.0  # seconds without the store after which a report is looked for on the disk; again after 6, 12, ...
COLLECTIVE_GRACE = 30.0  # seconds by which a collective's timeout exceeds the watchdog's, which can report the rank
# Errors of torch, gloo and NCCL that another rank's exit causes. They can be recognised by their texts only: they have no type
# or field of their own.
SECONDARY = ("Connection closed by peer", "Connection reset", "NCCL", "gloo", "Broken pipe", "TCPStore", "DistNetworkError")

Outcome = Literal["finished", "preempted", "interrupted"]


class Watchdog:
    """A watchdog that writes this rank's heartbeat and reads those of other ranks. Collective.

    Use it as a context manager around training. If an exception leaves the context, the failure is reported and the process
    exits.

    Args:
        run_dir: where failure.json and status.json are written.
        runtime: rank and world size.
        timeout: seconds without progress after which the launch is ended and the rank with the least progress is reported.
        folder: where the board of the node is created; None: in memory.
    """

    def __init__(self, run_dir: RunDir, runtime: Runtime, timeout: float, folder: Path | None = None):
        self.run_dir, self.runtime, self.timeout, self.folder = run_dir.path, runtime, timeout, folder or memory_folder()
        self.rank = runtime.rank
        self._stop = threading.Event()
        self._look_at_disk = STORE_GRACE  # seconds without the store
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.runtime.nodes > 1:
            prepare(self.runtime)
        self.board = NodeBoard(self.runtime, self.folder)
        self.nodes = NodeWatch(self.runtime, self.board)
        self.own = OwnHeartbeat(self.runtime, self.board)
        self.hang = HangCheck(self.runtime, self.timeout, self.own, self.board, self.nodes)
        self.own.write()
        self.nodes.look()  # sends the node's first heartbeat: a node that has never sent one cannot be missed
        self._thread.start()
        if self.rank == 0:
            write_status(self.run_dir, "running", 0, 0, heartbeats=self.board.path)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, ConfigError):
            self.stop()
            if error is not None and self.rank == 0:
                write_status(self.run_dir, "failed", self.own.epoch, self.own.step)
            return
        try:
            self.failed(error)
            sys.stdout.flush()
        finally:
            # Not sys.exit: an open process group could keep the interpreter from exiting.
            os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)

    def end(self, status: Outcome, progress: Progress) -> Outcome:
        """Write the outcome of the launch, on rank 0. Return `status`.

        Args:
            status: the outcome.
            progress: the progress at which training ended or, after a preemption, that of the last checkpoint.
        """
        if self.rank == 0:
            done = status == "finished"  # `progress` is then at the beginning of the next epoch
            write_status(self.run_dir, status, progress.epoch - done, progress.step)
            if not done:
                log.info(f"{status} at {progress}; to resume, run the same command with name={self.run_dir.name} resume=auto")
        return status

    def at(self, doing: str, epoch: int | None = None, step: int | None = None) -> None:
        """Record progress: the main thread enters the phase `doing`, one of PHASES, at this epoch and step."""
        self.own.at(doing, epoch, step)

    def stop(self) -> None:
        """Stop the watchdog thread, because this rank exits normally."""
        self._stop.set()
        self._thread.join()
        self.at("done")
        self.nodes.stop(ended=True)
        self.board.remove()
        self.board.close()

    def _watch(self) -> None:
        pace = Pace(BEAT)
        while not pace.wait(self._stop):
            if self.look():
                return

    def look(self) -> bool:
        """Write the heartbeat, and look at those of others. Return whether a failure is known, after this rank has left."""
        self.own.beat += 1
        self.own.write()
        if self._failed_elsewhere():
            # Exit later than the rank that reported the failure, so that torchrun's summary contains that rank's message.
            self.leave(GRACE + 4 * BEAT)
        elif found := find_dead_neighbour(self.board, self.runtime.local_rank):
            self._end(*found, "lost_rank")
        elif found := self.nodes.look():
            self._end(*found, "lost_node")
        elif found := self.hang.look():
            self._end(*found, "hang")
        else:
            return False
        return True

    def _failed_elsewhere(self) -> bool:
        """Whether another rank has reported a failure. A rank that leads its node tells the others of the node."""
        if self.board.read(FAILURE):
            return True
        known = self.nodes.failure is not None
        if self.nodes.silent < STORE_GRACE:
            self._look_at_disk = STORE_GRACE
        elif self.nodes.silent >= self._look_at_disk:  # whoever failed cannot announce it
            self._look_at_disk = 2 * self.nodes.silent  # the disk is shared by all nodes
            known = known or (self.run_dir / failure_report.FILE).exists()
        if known:
            self.board.write(FAILURE, self.nodes.failure or {"rank": None})
        return known

    def failed(self, error: BaseException) -> None:
        """Report an exception of the main thread if it is the first failure; otherwise append it to this rank's log only."""
        text = "".join(traceback.format_exception(error))
        secondary = any(text in str(error) for text in SECONDARY) or getattr(error, "rank", self.rank) != self.rank
        deadline = time.time() + (NODE_GRACE if self.runtime.nodes > 1 else GRACE)
        while secondary and time.time() < deadline and not self.board.read(FAILURE):
            time.sleep(BEAT / 5)
        what = (
            str(error)
            if isinstance(error, SampleError)
            else f"failed:\n{''.join(text.splitlines(True)[-6:]).rstrip()}{advice(text)}"
        )
        own = self.own.record()
        if isinstance(error, TrainingError):  # its message contains the step and the rank
            first = self._report(own, error.kind, f"error: {error}")
        else:
            first = self._report(own, "exception", describe(own, what, self._others(own)))
        if not first:
            text = f"Error on rank {self.rank} after another rank's failure, which is in failure.json:\n{text}"
        if first or self.rank < LOG_FILES:
            with (self.run_dir / (f"train.rank{self.rank}.log" if self.rank else "train.log")).open("a") as file:
                file.write(text)
        if not first and self.runtime.world_size > 1:
            time.sleep(4 * BEAT)  # the rank that reported the failure must exit first: torchrun's summary has its message
        self._stop.set()
        self.board.remove()

    def _others(self, who: Heartbeat) -> Others:
        return Others.of(who["rank"], self.runtime.world_size, self.board.heartbeats(), self.nodes.everyone())

    def _report(self, who: Heartbeat, kind: FailureKind, message: str) -> bool:
        """Report a failure and tell all ranks of it. Return whether it is the launch's first."""
        if self.board.read(FAILURE):
            return False
        first = failure_report.report(self.run_dir, self.rank, who, kind, message, self._others(who))
        self.board.write(FAILURE, who)
        if first and self.runtime.nodes > 1:
            announce(self.runtime, who)
        return first

    def _end(self, who: Heartbeat, what: str, kind: FailureKind) -> None:
        self._report(who, kind, describe(who, what, self._others(who)))
        self.leave(GRACE)

    def leave(self, grace: float) -> None:
        """Exit with code 1 unless the main thread, which may hang, stops the watchdog within `grace` seconds."""
        if not self._stop.wait(grace):
            self.board.remove()
            os._exit(1)
