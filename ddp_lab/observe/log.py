"""The log of a run: rank 0 writes to the console and to train.log.

Other ranks log only warnings.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ddp_lab.world.process import discard_output, print_line

log = logging.getLogger("ddp_lab")
SLOW = 3.0  # seconds after which what takes time is logged
AGAIN = 20.0  # seconds from there to the next such line
SHORTEST = 0.01  # seconds between two looks at what is slow
# the most ranks that have a log file of their own: not a file of each of a thousand ranks
LOG_FILES = 8


class Console(logging.StreamHandler[TextIO]):
    """The console of rank 0.

    When the reader of a pipe has gone, for example `| head`, the run is stopped as by Ctrl-C.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        """Report an error of the console, or stop the run."""
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            return super().handleError(record)
        discard_output()
        os.kill(os.getpid(), signal.SIGINT)


class LogFile(logging.FileHandler):
    """A log file whose errors, such as a full disk, are ignored."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: the line is on the console, too."""


@dataclass(eq=False)
class Activity:
    """What may take long.

    Attributes:
        name: what is logged.
        tell: logs it.
        due: when, as time.monotonic counts it.
    """

    name: str
    tell: Callable[[str], object]
    due: float


class Activities:
    """Logs those of the activities under way that take long, from one thread.

    An epoch has two, so that a thread for each would cost short epochs 0.1 %. The thread ends when
    nothing was under way for a while. As a rule it need not be woken up for a new activity: it
    sleeps for at most SLOW, before which nothing new is due.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, Activity] = {}
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._next_look = 0.0

    def begin(self, activity: Activity) -> None:
        """Log an activity when it is due, until it ends."""
        with self._changed:
            self._under_way[id(activity)] = activity
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="slow", daemon=True)
                self._thread.start()
            elif activity.due < self._next_look:
                self._changed.notify()

    def end(self, activity: Activity) -> None:
        """Log an activity no more."""
        self._under_way.pop(id(activity), None)  # a fork within its body does not know it

    def _watch(self) -> None:
        while self._is_needed():
            now = time.monotonic()
            for activity in [*self._under_way.values()]:
                if now >= activity.due:
                    activity.tell(f"{activity.name} ...")
                    activity.due = now + AGAIN
            self._sleep(now)

    def _is_needed(self) -> bool:
        """Return whether something is under way. If not, the thread must end."""
        with self._changed:
            if not self._under_way:
                self._thread = None
            return bool(self._under_way)

    def _sleep(self, now: float) -> None:
        """Sleep until something may be due."""
        with self._changed:
            dues = [activity.due for activity in self._under_way.values()]
            self._next_look = min([now + SLOW, *dues])
            self._changed.wait(max(SHORTEST, self._next_look - now))


activities = Activities()
# A fork has no thread, and the lock may have been taken.
os.register_at_fork(after_in_child=activities.__init__)


@contextmanager
def log_if_slow(name: str, tell: Callable[[str], object] = log.info) -> Generator[None]:
    """Log what the body does if it takes longer than a few seconds, and repeat it until it ends.

    `tell` is used before the log is set up.
    """
    activity = Activity(name, tell, time.monotonic() + SLOW)
    activities.begin(activity)
    try:
        yield
    finally:
        activities.end(activity)


def print_if_slow(activity: str, is_main: bool) -> AbstractContextManager[None]:
    """Print on rank 0 what the body does if it takes longer than a few seconds.

    For what happens before the log is set up.

    Args:
        activity: what the body does.
        is_main: whether this is rank 0.
    """
    if not is_main:
        return nullcontext()
    return log_if_slow(activity, lambda text: print_line(text, sys.stdout))


class Held(logging.Handler):
    """Keeps what is logged before the log is set up.

    Attributes:
        records: in their order.
    """

    def __init__(self):
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)

    def pass_on(self) -> None:
        """Log the records. Called after `setup_logging`."""
        for record in self.records:
            if log.isEnabledFor(record.levelno):
                log.handle(record)
        self.records = []


@contextmanager
def log_held() -> Generator[Held]:
    """Keep what the body logs, before there is a run directory for the log."""
    handler = Held()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False  # an earlier run of this process may have left its files open
    try:
        yield handler
    finally:
        log.propagate = True
        log.removeHandler(handler)
        log.setLevel(level)


def setup_logging(run_dir: Path, rank: int) -> None:
    """Set up the console and the log file of one rank.

    Rank 0 logs INFO and above to stdout and train.log. Other ranks log warnings and errors,
    prefixed with the rank, to stderr, and the first LOG_FILES ranks also to train.rank<N>.log,
    which is created by the first of them.

    Args:
        run_dir: directory of the log file.
        rank: this process's global rank.
    """
    name = f"[rank {rank}] " if rank else ""
    console = Console(sys.stderr if rank else sys.stdout)
    console.setFormatter(logging.Formatter(f"{name}%(message)s"))
    handlers: list[logging.Handler] = [console]
    if rank < LOG_FILES:
        file = LogFile(run_dir / (f"train.rank{rank}.log" if rank else "train.log"), delay=True)
        file.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {name}%(message)s"))
        handlers.append(file)
    logging.basicConfig(handlers=handlers, level=logging.WARNING, force=True)
    log.setLevel(logging.WARNING if rank else logging.INFO)
    # the first picture would warn about matplotlib's font cache
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    logging.captureWarnings(True)
