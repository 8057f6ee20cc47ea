"""Detection of a hang: no rank makes progress, and the one for which the others wait is reported."""

import sys
import threading
import traceback

from ddp_lab.resilience.heartbeat import OwnHeartbeat
from ddp_lab.resilience.node_board import NodeBoard
from ddp_lab.resilience.node_link import PERIOD
from ddp_lab.resilience.node_watch import BEAT, Found, NodeWatch
from ddp_lab.resilience.overview import find_last
from ddp_lab.world.runtime import Runtime


class HangCheck:
    """Counts for how long this rank has made no progress. Construct it in the thread whose progress counts.

    The time is counted in heartbeats, not read from the clock: time while this process is suspended does not count. A hang is
    found in two steps: the overview of all nodes has the node and the rank with the least progress, and that rank, which can
    report its stack, reports itself.

    Args:
        timeout: seconds without progress after which the launch hangs.
    """

    def __init__(self, runtime: Runtime, timeout: float, own: OwnHeartbeat, board: NodeBoard, nodes: NodeWatch):
        self.timeout, self.own, self.board, self.nodes = timeout, own, board, nodes
        # It is judged when the heartbeats of all ranks show who waits in a collective.
        self.settled = timeout + 2 * BEAT + (4 * PERIOD if runtime.nodes > 1 else 0)
        self._main = threading.get_ident()
        self._since, self._still = own.since, 0.0

    def look(self) -> Found | None:
        """Return the rank for which the others wait, if this rank has to report it. Call it once per heartbeat."""
        own = self.own
        self._still = self._still + BEAT if self._since == own.since else 0.0
        self._since = own.since
        own.waits = False
        if self._still < self.timeout:
            return None
        frame = sys._current_frames()[self._main]  # pyright: ignore[reportPrivateUsage]  # documented, and the only way
        own.waits = "/torch/" in frame.f_code.co_filename  # most likely in a collective
        own.write()
        if self._still < self.settled:
            return None
        last = find_last(self.board.heartbeats(), self.nodes.everyone())
        if last["rank"] == own.record()["rank"]:
            stack = "".join(traceback.format_stack(frame)[-3:])
            limit = f"timeout={self.timeout:g}; raise it if a step may take longer"
            return last, f"hangs: no progress for {self._still:.0f} s ({limit}), in\n{stack}"
        if self.nodes.leads and self._still > self.settled + 4 * BEAT:  # the hanging rank reports first
            what = f"stalls the other ranks, which have waited for {self._still:.0f} s (timeout={self.timeout:g})"
            return last, f"{what}. Its own watchdog reports nothing: the process is suspended, or its node is down"
        return None
