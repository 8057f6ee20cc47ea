"""The watchdog: heartbeats of all ranks, detection of lost and hanging ranks, and the report of the first failure.

Each rank writes its heartbeat (`runs/<name>/ranks/<rank>.json`), and a thread of each rank reads those of the others twice a
second. The thread runs even while the main thread waits in a collective for a rank that never arrives. Only the first failure
is reported: on the screen, in `failure.json` and in `status.json`. Errors that it causes on other ranks go to their log files.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any, Literal, cast

from ddp_lab.config.errors import ConfigError, FailureKind, SampleError, TrainingError
from ddp_lab.observe.logger import log
from ddp_lab.resilience.run_directory import RunDir, read_json, write_status
from ddp_lab.training.progress import Progress
from ddp_lab.world.process import is_alive, machine, show
from ddp_lab.world.runtime import Runtime

BEAT = 0.5  # seconds between two heartbeats
GRACE = 5.0  # seconds for which a rank whose collective failed waits for another rank's report
COLLECTIVE_GRACE = 30.0  # seconds by which a collective's timeout exceeds the watchdog's, which can report the rank
PHASES = ("starting", "compiling", "loading", "training", "finishing", "deciding", "saving", "evaluating", "done")
# Errors of torch, gloo and NCCL that another rank's exit causes. They can be recognised by their texts only: they have no type
# or field of their own.
SECONDARY = ("Connection closed by peer", "Connection reset", "NCCL", "gloo", "Broken pipe", "TCPStore", "DistNetworkError")


def suspicion(heartbeat: dict[str, Any]) -> tuple[int, bool, int, float]:
    """Return the sort key of a rank in a hang: the other ranks wait for the rank with the smallest key.

    That is the rank with the least progress. In the same step, ranks that wait in a collective are sorted last: a rank can hang
    after a collective in which the others still wait for its data.
    """
    return heartbeat["step"], heartbeat["waits"], PHASES.index(heartbeat["doing"]), heartbeat["since"]


Outcome = Literal["finished", "preempted"]


class Watchdog:
    """A watchdog that writes this rank's heartbeat and reads those of the other ranks.

    Use it as a context manager around training. If an exception leaves the context, the failure is reported and the process
    exits.

    Args:
        run_dir: where heartbeats, failure.json and status.json are written.
        runtime: rank and world size.
        timeout: seconds without progress after which the launch is ended and the rank with the least progress is reported.
    """

    def __init__(self, run_dir: RunDir, runtime: Runtime, timeout: float):
        self.run_dir, self.timeout = run_dir.path, timeout
        self.rank, self.world_size = runtime.rank, runtime.world_size
        self.folder = run_dir.path / "ranks"
        self.epoch, self.step, self.doing, self.since = 0, 0, "starting", time.time()
        self.waits = False
        self.place: dict[str, Any] = {"rank": self.rank, "host": socket.gethostname(), "pid": os.getpid(), "machine": machine()}
        self.place["attempt"] = run_dir.attempt
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self.folder.mkdir(exist_ok=True)
        self._file = os.open(self.folder / f"{self.rank}.json", os.O_CREAT | os.O_WRONLY)
        self._write_heartbeat()
        self._thread.start()
        if self.rank == 0:
            write_status(self.run_dir, "running", 0, 0)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, ConfigError):
            self.stop()
            if error is not None and self.rank == 0:
                write_status(self.run_dir, "failed", self.epoch, self.step)
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
            if status == "preempted":
                log.info(f"preempted at {progress}; to resume, run the same command with name={self.run_dir.name} resume=auto")
        return status

    def at(self, doing: str, epoch: int | None = None, step: int | None = None) -> None:
        """Record progress: the main thread enters the phase `doing`, one of PHASES, at this epoch and step."""
        self.epoch, self.step = self.epoch if epoch is None else epoch, self.step if step is None else step
        self.doing, self.since = doing, time.time()
        if doing != "loading":  # every step begins with this phase; if it takes long, the watchdog thread writes it
            self._write_heartbeat()

    def stop(self) -> None:
        """Stop the watchdog thread, because this rank exits normally."""
        self._stop.set()
        self._thread.join()
        self.at("done")

    def _write_heartbeat(self) -> None:
        # One small write in place costs a few microseconds per step. If the rank is killed, the file contains its last phase;
        # only the phase "loading" is written up to half a second late.
        with self._lock:
            os.pwrite(self._file, json.dumps(self._heartbeat()).ljust(512).encode(), 0)

    def _heartbeat(self) -> dict[str, Any]:
        now = {"epoch": self.epoch, "step": self.step, "doing": self.doing, "since": self.since, "waits": self.waits}
        return self.place | now

    def others(self) -> list[dict[str, Any]]:
        """Return the last heartbeats of the other ranks that have written one in this attempt."""
        read = (read_json(self.folder / f"{rank}.json") for rank in range(self.world_size) if rank != self.rank)
        return [record for record in read if record and record["attempt"] == self.place["attempt"]]

    def _watch(self) -> None:
        since, still = self.since, 0.0
        while not self._stop.wait(BEAT):
            with suppress(OSError):  # the main thread gets the same error and reports it
                self._write_heartbeat()
            # The time is counted in heartbeats, not read from the clock: time while this process is suspended does not count.
            still = still + BEAT if since == self.since else 0.0
            since = self.since
            if (self.run_dir / "failure.json").exists():
                # Exit later than the rank that reported the failure, so that torchrun's summary contains that rank's message.
                self._leave(GRACE + 4 * BEAT)
            for other in self.others():
                if other["machine"] == self.place["machine"] and other["doing"] != "done" and not is_alive(other["pid"]):
                    what = "exited without reporting an error: killed, crashed or left early (torchrun prints its exit code)"
                    self._end(other, "lost_rank", what)
            self._check_for_hang(still)

    def _check_for_hang(self, still: float) -> None:
        """Report a hang once this rank has made no progress for `still` >= timeout seconds."""
        self.waits = False
        if still < self.timeout:
            return
        main = cast(int, threading.main_thread().ident)  # None only before a thread is started
        frame = sys._current_frames()[main]  # pyright: ignore[reportPrivateUsage]  # CPython documents it, and has no other way
        self.waits = "/torch/" in frame.f_code.co_filename  # most likely in a collective
        self._write_heartbeat()
        if still < self.timeout + 2 * BEAT:
            return  # wait until the other ranks have written `waits`, too
        last = min([self._heartbeat(), *self.others()], key=suspicion)
        if last["rank"] == self.rank:
            stack = "".join(traceback.format_stack(frame)[-3:])
            limit = f"timeout={self.timeout:g}; raise it if a step may take longer"
            self._end(last, "hang", f"hangs: no progress for {still:.0f} s ({limit}), in\n{stack}")
        elif still > self.timeout + 6 * BEAT:  # the hanging rank reports first, because it can report its stack
            what = f"stalls the other ranks, which have waited for {still:.0f} s (timeout={self.timeout:g})"
            self._end(last, "hang", f"{what}. Its own watchdog reports nothing: the process is suspended, or its node is down")

    def failed(self, error: BaseException) -> None:
        """Report an exception of the main thread if it is the first failure; otherwise append it to this rank's log only."""
        text = "".join(traceback.format_exception(error))
        deadline = time.time() + GRACE
        secondary = any(text in str(error) for text in SECONDARY) or getattr(error, "rank", self.rank) != self.rank
        while secondary and time.time() < deadline:
            if (self.run_dir / "failure.json").exists():
                break
            time.sleep(BEAT / 5)
        what = str(error) if isinstance(error, SampleError) else f"failed:\n{''.join(text.splitlines(True)[-6:])}"
        own = self._heartbeat()
        if isinstance(error, TrainingError):  # its message contains the step and the rank
            first = self._report(own, error.kind, f"error: {error}")
        else:
            first = self._report(own, "exception", self._describe(own, what))
        if not first:
            text = f"Error on rank {self.rank} after another rank's failure, which is in failure.json:\n{text}"
        with (self.run_dir / (f"train.rank{self.rank}.log" if self.rank else "train.log")).open("a") as file:
            file.write(text)
        if not first and self.world_size > 1:
            time.sleep(4 * BEAT)  # the rank that reported the failure must exit first: torchrun's summary has its message
        self._stop.set()

    def _all_but(self, failed: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the heartbeats of all ranks but the one with the heartbeat `failed`, by rank."""
        heartbeats = [self._heartbeat(), *self.others()]
        return sorted((beat for beat in heartbeats if beat["rank"] != failed["rank"]), key=lambda beat: beat["rank"])

    def _describe(self, who: dict[str, Any], what: str) -> str:
        place = f"rank {who['rank']} on {who['host']} (pid {who['pid']}), epoch {who['epoch']}, step {who['step']}"
        others = "; ".join(f"rank {record['rank']} {record['doing']}, step {record['step']}" for record in self._all_but(who))
        message = f"error: {place}, {who['doing']}: {what.rstrip()}"
        return f"{message}\nThe other ranks at that time: {others}" if others else message

    def _report(self, who: dict[str, Any], kind: FailureKind, message: str) -> bool:
        """Write and print a failure if it is the launch's first. Return whether it is.

        Args:
            who: the heartbeat of the rank that failed.
        """
        path = self.run_dir / "failure.json"
        record = {**who, "kind": kind, "message": message, "others": self._all_but(who)}
        record |= {"reported_by": self.rank, "time": time.time()}
        temporary = path.with_name(f".failure.{self.rank}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(record, indent=1))
            os.link(temporary, path)  # unlike a rename, this fails if the file exists: only the first failure is reported
            temporary.unlink()
            write_status(self.run_dir, "failed", who["epoch"], who["step"])
        except FileExistsError:
            temporary.unlink()
            return False
        except OSError as error:  # a full disk or a removed directory: the failure is only printed
            message += f"\n(failure.json could not be written in {self.run_dir}: {error.strerror})"
        show(f"{message}\nDetails: {self.run_dir}/train*.log, {path}", int(who["since"]) - 1)
        return True

    def _end(self, who: dict[str, Any], kind: FailureKind, what: str) -> None:
        self._report(who, kind, self._describe(who, what))
        self._leave()

    def _leave(self, grace: float = GRACE) -> None:
        """Exit with code 1 unless the main thread, which may hang, stops the watchdog within `grace` seconds."""
        if not self._stop.wait(grace):
            os._exit(1)
