"""The log of a run: rank 0 writes to the console and to train.log.

Other ranks log only warnings.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TextIO

from ddp_lab.world.process import discard_output

log = logging.getLogger("ddp_lab")
SLOW = 3.0  # seconds after which what takes time is logged
AGAIN = 20.0  # seconds from there to the next such line
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


@contextmanager
def log_if_slow(activity: str, tell: Callable[[str], object] = log.info) -> Generator[None]:
    """Log what the body does if it takes longer than a few seconds, and repeat it until it ends.

    `tell` is used before the log is set up.
    """
    ended = threading.Event()

    def repeat() -> None:
        wait = SLOW
        while not ended.wait(wait):
            tell(f"{activity} ...")
            wait = AGAIN

    threading.Thread(target=repeat, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def print_if_slow(activity: str, is_main: bool) -> AbstractContextManager[None]:
    """Print on rank 0 what the body does if it takes longer than a few seconds.

    For what happens before the log is set up.

    Args:
        activity: what the body does.
        is_main: whether this is rank 0.
    """
    return log_if_slow(activity, partial(print, flush=True)) if is_main else nullcontext()


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
