"""A loader's worker process: it outlives the signals of a scheduler, and ends with its rank.

A scheduler or a terminal sends SIGTERM or SIGINT to all processes of a launch. The rank then saves
a checkpoint, for which it may still need batches, so its workers ignore these signals. What
multiprocessing and torch send to end a worker is SIGTERM, too, and they wait for it without a
limit. Workers therefore end by themselves, by a thread of their own.
"""

import os
import signal
import threading
import time
from typing import Protocol

from ddp_lab.world.process import REQUESTS

LOOK = 0.5  # seconds between two looks at the rank
# seconds in which a worker may end as torch asks it to, which loses nothing that is in a queue
GRACE = 1.0


class Flag(Protocol):
    """A value in memory that the rank shares with its workers: `multiprocessing.RawValue`."""

    value: bool


def begin_worker(ended: Flag, worker: int) -> None:
    """Prepare a worker process.

    Args:
        ended: the rank sets it when the workers are to end.
        worker: number of the worker, which torch passes.
    """
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(
        target=leave_with_rank, args=(ended, os.getppid()), name="leave", daemon=True
    ).start()


def leave_with_rank(ended: Flag, parent: int) -> None:
    """Wait until the workers are to end or the rank has died, and end this process.

    It ends in the middle of a sample, too.
    """
    while os.getppid() == parent and not ended.value:
        time.sleep(LOOK)
    if ended.value:
        time.sleep(GRACE)
    os._exit(0)  # with another code, torch would report a lost worker
