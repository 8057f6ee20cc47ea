"""Notices on rank 0 about long work before the first step: what is done, and how long it has taken so far."""

import logging
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from ddp_lab.observe.logger import log

CLEAR = "\033[K"  # clears the rest of a terminal's line


@contextmanager
def working(what: str, tick: float = 1.0, interval: float = 30.0) -> Generator[None]:
    """Show what is done while the body runs, and then log how many seconds it took.

    On a terminal, one line counts the seconds. Otherwise a line is logged at the beginning and one every `interval` seconds.
    Nothing is shown if the body takes less than `tick` seconds. Ranks other than 0, which log only warnings, show nothing.

    Args:
        what: description of the work, for example "compiling the training step".
        tick: seconds before the first notice, and between two updates of the terminal's line.
        interval: seconds between two lines of a log.
    """
    if not log.isEnabledFor(logging.INFO):
        yield
        return
    start, done = time.perf_counter(), threading.Event()
    thread = threading.Thread(target=_show, args=(what, start, done, tick, interval), name="notice", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if (seconds := time.perf_counter() - start) >= tick:
        log.info(f"{what}: took {seconds:.1f} s")


def _show(what: str, start: float, done: threading.Event, tick: float, interval: float) -> None:
    """Show the notices. This thread must not call CUDA, because another one may be capturing a graph."""
    if done.wait(tick):
        return
    if sys.stderr.isatty():
        waiting = True
        while waiting:
            print(f"\r{what}: {time.perf_counter() - start:.0f} s{CLEAR}", end="", file=sys.stderr, flush=True)
            waiting = not done.wait(tick)
        print(f"\r{CLEAR}", end="", file=sys.stderr, flush=True)
        return
    log.info(f"{what} ...")
    while not done.wait(interval):
        log.info(f"{what}: {time.perf_counter() - start:.0f} s so far")
