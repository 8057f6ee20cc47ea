"""The heartbeat of this rank."""

import os
import socket
import threading
import time
from typing import Any

from ddp_lab.resilience.node_board import RANKS, Heartbeat, NodeBoard
from ddp_lab.world.runtime import Runtime


class OwnHeartbeat:
    """What this rank does, written on the board of its node. The main thread and the watchdog's thread use it.

    Attributes:
        epoch, step, doing, since: the phase of the main thread, and since when (Unix time) it is in it.
        beat: number of looks that the watchdog's thread has taken; the others see by it that the process is not suspended.
        waits: whether the main thread is most likely in a collective. It is only found out if the launch hangs.
    """

    def __init__(self, runtime: Runtime, board: NodeBoard):
        self.epoch, self.step, self.doing, self.since = 0, 0, "starting", time.time()
        self.beat, self.waits = 0, False
        self._place = {"rank": runtime.rank, "host": socket.gethostname(), "pid": os.getpid(), "node": runtime.node}
        self._board, self._page = board, RANKS + runtime.local_rank
        self._lock = threading.Lock()

    def at(self, doing: str, epoch: int | None = None, step: int | None = None) -> None:
        """Record progress; as `Watchdog.at`."""
        self.epoch, self.step = self.epoch if epoch is None else epoch, self.step if step is None else step
        self.doing, self.since = doing, time.time()
        if doing != "loading":  # every step begins with this phase; if it takes long, the watchdog thread writes it
            self.write()

    def write(self) -> None:
        """Write it on the board.

        This costs a few microseconds per step. If the rank is killed, the board has its last phase; only the phase "loading" is
        written up to half a second late.
        """
        with self._lock:
            self._board.write(self._page, self.record())

    def record(self) -> Heartbeat:
        """Return it."""
        now: dict[str, Any] = {"epoch": self.epoch, "step": self.step, "doing": self.doing, "since": self.since}
        return self._place | now | {"beat": self.beat, "waits": self.waits}
