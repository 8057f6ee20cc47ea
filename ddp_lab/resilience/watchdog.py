"""Every rank's eye on the others: who is where, who is gone, who stands still, and who failed first.

Every rank writes where it is (`runs/<name>/ranks/<rank>.json`), and a thread of each looks at the others' twice a second.
Threads run while the main thread waits in a collective for a rank that will never come. The first failure, and it alone, is
told: on the screen, in `failure.json`, in `status.json`. What follows from it on the other ranks goes into their log files.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any

from ddp_lab.config.errors import ConfigError, FailureKind, TrainingError
from ddp_lab.observe.logger import log
from ddp_lab.resilience.run_directory import RunDir, read_json, write_status
from ddp_lab.training.progress import Progress
from ddp_lab.world.process import is_alive, machine, show
from ddp_lab.world.runtime import Runtime

BEAT = 0.5  # seconds between two looks
GRACE = 5.0  # seconds that a rank whose collective failed waits for the news of who did it
COLLECTIVE_GRACE = 30.0  # seconds that a collective waits longer than the watch, which knows for whom
PHASES = ("starting", "compiling", "loading", "training", "finishing", "deciding", "saving", "evaluating", "done")
# Errors of torch, gloo and NCCL about another rank's end. Their texts alone tell them from others: no type or field does.
SECONDARY = ("Connection closed by peer", "Connection reset", "NCCL", "gloo", "Broken pipe", "TCPStore", "DistNetworkError")


def suspicion(record: dict[str, Any]) -> tuple:
    """The least of the ranks that stand still is the one that the others wait for: it has come the least far. Within a step
    those that wait come last: a rank can be frozen behind a collective that its peers are still in, for want of its bytes."""
    return record["step"], record["waits"], PHASES.index(record["doing"]), record["since"]


class Watchdog:
    """What this rank shows the others and sees of them.

    Args:
        timeout: seconds without any progress after which the launch is ended, and the rank that lags behind is named.
    """

    def __init__(self, run_dir: RunDir, runtime: Runtime, timeout: float):
        self.run_dir, self.timeout = run_dir.path, timeout
        self.rank, self.world_size = runtime.rank, runtime.world_size
        self.folder = run_dir.path / "ranks"
        self.epoch, self.step, self.doing, self.since = 0, 0, "starting", time.time()
        self.waits = False
        self.place = {"rank": self.rank, "host": socket.gethostname(), "pid": os.getpid(), "machine": machine()}
        self.place["attempt"] = run_dir.attempt
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> "Watchdog":
        self.folder.mkdir(exist_ok=True)
        self._file = os.open(self.folder / f"{self.rank}.json", os.O_CREAT | os.O_WRONLY)
        self._show()
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
            os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)  # an open group could keep the interpreter from ending

    def end(self, status: str, progress: Progress) -> str:
        """Rank 0 writes the launch's outcome; returns it."""
        if self.rank == 0:
            done = status == "finished"  # then `progress` is at the next epoch's beginning
            write_status(self.run_dir, status, progress.epoch - done, progress.step)
            if status == "preempted":
                log.info(
                    f"preempted at {progress}; start the same line with name={self.run_dir.name} resume=auto to go on there"
                )
        return status

    def at(self, doing: str, epoch: int | None = None, step: int | None = None) -> None:
        """Progress: the main thread begins something."""
        self.epoch, self.step = self.epoch if epoch is None else epoch, self.step if step is None else step
        self.doing, self.since = doing, time.time()
        if doing != "loading":  # every step begins with it; where it takes long, the thread shows it
            self._show()

    def stop(self) -> None:
        """This rank is leaving as it should."""
        self._stop.set()
        self._thread.join()
        self.at("done")

    def _show(self) -> None:
        # In one small write over the last one: what a killed rank did last is on record, for some microseconds a step. (That it
        # was loading, half a second later.)
        with self._lock:
            os.pwrite(self._file, json.dumps(self._me()).ljust(512).encode(), 0)

    def _me(self) -> dict[str, Any]:
        now = {"epoch": self.epoch, "step": self.step, "doing": self.doing, "since": self.since, "waits": self.waits}
        return self.place | now

    def others(self) -> list[dict[str, Any]]:
        """What the other ranks last showed."""
        shown = (read_json(self.folder / f"{rank}.json") for rank in range(self.world_size) if rank != self.rank)
        return [record for record in shown if record and record["attempt"] == self.place["attempt"]]

    def _look(self) -> None:
        since, still = self.since, 0.0
        while not self._stop.wait(BEAT):
            with suppress(OSError):  # which the main thread meets, too, and tells
                self._show()
            still = still + BEAT if since == self.since else 0.0  # not the clock: a process that was suspended is not late
            since = self.since
            if (self.run_dir / "failure.json").exists():
                self._leave(GRACE + 4 * BEAT)  # after the rank that reported it, whose message torchrun's summary then has
            for other in self.others():
                if other["machine"] == self.place["machine"] and other["doing"] != "done" and not is_alive(other["pid"]):
                    what = "is gone without a word: killed, crashed or left (torchrun's lines have its signal)"
                    self._end(other, "lost_rank", what)
            self._judge_standstill(still)

    def _judge_standstill(self, still: float) -> None:
        """`still`: seconds without progress of this rank."""
        self.waits = False
        if still < self.timeout:
            return
        frame = sys._current_frames()[threading.main_thread().ident]
        self.waits = "/torch/" in frame.f_code.co_filename  # most likely in a collective
        self._show()
        if still < self.timeout + 2 * BEAT:
            return  # until the others have shown the same
        last = min([self._me(), *self.others()], key=suspicion)
        if last["rank"] == self.rank:
            stack = "".join(traceback.format_stack(frame)[-3:])
            self._end(last, "hang", f"stands still for {still:.0f} s (timeout={self.timeout:g}), in\n{stack}")
        elif still > self.timeout + 6 * BEAT:  # it would know more: its stack
            self._end(last, "hang", f"holds up the others, who have waited for {still:.0f} s (timeout={self.timeout:g})")

    def failed(self, error: BaseException) -> None:
        """The main thread's end by an exception. Tells it if it is the first failure; else it goes into this rank's log."""
        text = "".join(traceback.format_exception(error))
        deadline = time.time() + GRACE
        secondary = any(word in str(error) for word in SECONDARY) or getattr(error, "rank", self.rank) != self.rank
        while secondary and time.time() < deadline:
            if (self.run_dir / "failure.json").exists():
                break
            time.sleep(BEAT / 5)
        what = f"failed:\n{''.join(text.splitlines(True)[-6:])}"
        if isinstance(error, TrainingError):  # says itself what happened where
            first = self._tell(self._me(), error.kind, f"error: {error}")
        else:
            first = self._tell(self._me(), "exception", self._describe(self._me(), what))
        if not first:
            text = f"What followed on rank {self.rank} from another rank's failure:\n{text}"
        with (self.run_dir / (f"train.rank{self.rank}.log" if self.rank else "train.log")).open("a") as file:
            file.write(text)
        self._stop.set()

    def _besides(self, who: dict[str, Any]) -> list[dict[str, Any]]:
        return sorted((r for r in [self._me(), *self.others()] if r["rank"] != who["rank"]), key=lambda r: r["rank"])

    def _describe(self, who: dict[str, Any], what: str) -> str:
        place = f"rank {who['rank']} on {who['host']} (pid {who['pid']}), epoch {who['epoch']}, step {who['step']}"
        others = "; ".join(f"rank {record['rank']} {record['doing']}, step {record['step']}" for record in self._besides(who))
        return f"error: {place}, {who['doing']}: {what.rstrip()}" + (f"\nThe others then: {others}" if others else "")

    def _tell(self, who: dict[str, Any], kind: FailureKind, message: str) -> bool:
        """Whether this was the first failure told; the others' words are not shown."""
        path = self.run_dir / "failure.json"
        record = {**who, "kind": kind, "message": message, "others": self._besides(who)}
        record |= {"told_by": self.rank, "time": time.time()}
        try:
            temporary = path.with_name(f".failure.{self.rank}.{os.getpid()}")
            temporary.write_text(json.dumps(record, indent=1))
            os.link(temporary, path)  # unlike a rename, refuses where the file exists: the first is told
            temporary.unlink()
            write_status(self.run_dir, "failed", who["epoch"], who["step"])
        except FileExistsError:
            temporary.unlink()
            return False
        except OSError as error:  # the disk is full or the directory gone: then the screen alone has it
            message += f"\n({self.run_dir} cannot be written: {error.strerror})"
        show(f"{message}\nMore: {self.run_dir}/train*.log, {path}", int(who["since"]) - 1)
        return True

    def _end(self, who: dict[str, Any], kind: FailureKind, what: str) -> None:
        self._tell(who, kind, self._describe(who, what))
        self._leave()

    def _leave(self, grace: float = GRACE) -> None:
        """Ends this rank, whose main thread may wait for ever; if it ends by itself within `grace` seconds, lets it."""
        if not self._stop.wait(grace):
            os._exit(1)
