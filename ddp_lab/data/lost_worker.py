"""A worker process of a loader that was killed or has exited.

What torch says of it becomes a message with what to do.

torch raises its error wherever the rank then is, most often while it waits for a batch, but also in
the middle of a step: a handler of the signal SIGCHLD raises it. Several processes may be lost at
once, of which the first one is the cause. The handler would raise for each, also while the effects
of the first error are handled, where Python can only print it.
"""

import re
import shutil
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import cast

from ddp_lab.config.errors import SampleError
from ddp_lab.world.device import size

# As torch's DataLoader and its handler of SIGCHLD say it.
LOST = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (is killed by signal: ([\w ]+)|exited "
    "unexpectedly)"
)
DEATH = 1.0  # seconds from the end of its connections to that of a process
SHARED = "/dev/shm"
LARGER = f"mount -o remount,size=8G {SHARED}, or of a container docker run --shm-size=8g"
FEWER = (
    "Use fewer worker processes (data.num_workers, in a Lab num_workers) or a smaller batch_size"
)


def find_lost_worker(error: BaseException | None) -> SampleError | None:
    """Return what stands for an error of torch about a lost worker process.

    Return None if the error has another reason.
    """
    seen = set[int]()  # what is raised again while its own effect is handled makes a cycle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RuntimeError) and (match := LOST.search(str(error))):
            pids, _, killed_by = match.groups()
            return lost_worker(pids, killed_by)
        error = error.__cause__ or error.__context__
    return None


def find_ended(error: BaseException, workers: Sequence[BaseProcess]) -> SampleError | None:
    """Return what stands for an error while a batch was received; None if no worker has ended.

    A worker passes its batches through a connection, which breaks if it is killed meanwhile.

    Args:
        error: of torch, or of the connection.
        workers: the worker processes of the loader.
    """
    sentinels = {worker.sentinel: worker for worker in workers}
    is_connection = isinstance(error, (OSError, EOFError))
    for sentinel in wait([*sentinels], DEATH if is_connection else 0):
        worker = sentinels[cast(int, sentinel)]
        try:
            worker.join()  # a process closes its files a moment before it has ended
        except RuntimeError as lost:  # of torch's handler of SIGCHLD
            return find_lost_worker(lost)
        if worker.exitcode is not None:
            killed_by = signal.strsignal(-worker.exitcode) if worker.exitcode < 0 else None
            return lost_worker(str(worker.pid), killed_by)
    return find_lost_worker(error)


class RaisesOnce:
    """A handler of SIGCHLD that calls another one, and raises its error about a lost process once.

    Args:
        handler: torch's, which raises for each loader of which a worker process was lost, and calls
            the handler before it.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], object]):
        self._handler = handler
        self.has_raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handler(number, frame)
        except RuntimeError as error:
            is_about_lost = LOST.search(str(error)) is not None
            if is_about_lost and self.has_raised:
                return
            self.has_raised |= is_about_lost
            raise


def raise_once() -> None:
    """Let torch's handler raise one error from now on, for the first worker process that is lost.

    To be called when a loader has started its processes, with which torch sets the handler.
    """
    if not is_main_thread():
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if isinstance(handler, RaisesOnce):
        handler.has_raised = False
    elif callable(handler):
        signal.signal(signal.SIGCHLD, RaisesOnce(handler))


def is_main_thread() -> bool:
    """Return whether this thread is the one that runs handlers, which only it can set."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def lost_workers_ignored() -> Generator[None]:
    """Let no worker process that ends raise an error in the body, which ends them all."""
    if not is_main_thread():
        yield
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        if handler is not None:  # one that Python has not set cannot be set again
            signal.signal(signal.SIGCHLD, handler)


def lost_worker(pids: str, killed_by: str | None) -> SampleError:
    """Return the error about worker processes. The second argument is that of `describe_end`."""
    return SampleError(
        f"a worker process that reads the dataset (pid {pids}) {describe_end(killed_by)}"
    )


def describe_end(killed_by: str | None) -> str:
    """Return how a worker process has ended, the likely reason, and what to do.

    Args:
        killed_by: the signal in the words of the C library; None: it has exited, or torch does not
            know.
    """
    names = {signal.strsignal(each): each for each in signal.Signals}
    number = names.get(killed_by)
    how = f"was killed by {number.name if number else killed_by}"
    if number == signal.SIGBUS:
        return (
            f"{how}, most likely because shared memory is full: {free_shared()}. {FEWER}, or "
            f"enlarge it ({LARGER})"
        )

    if number == signal.SIGKILL:
        return (
            f"{how}, most likely by the system because the memory of the machine or of the "
            f"container was used up. {FEWER}, or keep less in memory in the dataset, of which each "
            "process has a copy"
        )

    if killed_by is not None:
        return (
            f"{how}, most likely in a compiled library that the dataset uses. Find the sample with "
            "num_workers=0 and `python -X faulthandler`"
        )

    return (
        "has exited: it was killed, most likely because memory or shared memory was used up, or "
        f"the code of the dataset has ended it, for example by os._exit. {FEWER}; with "
        "num_workers=0 the dataset is read by the rank itself"
    )


def free_shared() -> str:
    """Return how much of the shared memory is free, for a message."""
    try:
        usage = shutil.disk_usage(SHARED)
    except OSError:
        return "its size is not known"
    return f"{size(usage.free)} of {size(usage.total)} in {SHARED} are free now"
