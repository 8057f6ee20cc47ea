"""What a rank finds when it looks at its own node, and, if it leads its node, at the others."""

from ddp_lab.resilience.node_board import OVERVIEW, RANKS, Heartbeat, NodeBoard
from ddp_lab.resilience.node_link import VANISHED, NodeLink
from ddp_lab.resilience.overview import Overview
from ddp_lab.resilience.unchanged import Unchanged
from ddp_lab.world.process import is_alive
from ddp_lab.world.runtime import Runtime

BEAT = 0.5  # seconds between two looks
FROZEN = 6  # looks without a heartbeat after which the next rank of the node leads it

KILLED = "exited without reporting an error: killed, crashed or left early"
GONE = f"its node has sent no heartbeat for {VANISHED:g} s: it is down or cut off, or all its processes are killed or suspended"
Found = tuple[Heartbeat, str]  # the rank that failed, and what happened to it


def find_dead_neighbour(board: NodeBoard, local_rank: int) -> Found | None:
    """Return the next rank of this node that has not left normally, if its process has exited; None if it has not.

    Each rank watches only one other, so the cost of a look does not depend on the number of ranks. If some ranks of a node are
    dead, the one before them still finds the first of them.
    """
    for distance in range(1, board.size):
        beat = board.read(RANKS + (local_rank + distance) % board.size)
        if beat is not None and beat["doing"] != "done":
            return None if is_alive(beat["pid"]) else (beat, KILLED)
    return None


class NodeWatch:
    """The part of a rank's watchdog that concerns other nodes. Nothing of it is used on a single node.

    The first rank of a node leads it. If its process is suspended, the next one leads: a suspended rank is not a lost node.
    """

    def __init__(self, runtime: Runtime, board: NodeBoard):
        self.runtime, self.board = runtime, board
        self.link: NodeLink | None = None
        self.silent = 0.0  # seconds since the store has answered
        self._unchanged = Unchanged()

    def look(self) -> Found | None:
        """Lead the node if it is this rank's turn. Return the node that has vanished, if one has."""
        if self.runtime.nodes == 1:
            return None
        if not self._leads():
            self.stop(ended=False)
            return None
        if self.link is None:
            self.link = NodeLink(self.runtime, lambda: Overview.of(self.board.heartbeats()))
        link = self.link
        if link.overview:
            self.board.write(OVERVIEW, {"states": link.overview.states, "least": link.overview.least})
        self.silent = BEAT * self._unchanged.count("store", (id(link), link.turns))
        if link.vanished:
            return link.vanished, GONE
        if link.overview is None or link.opening(link.overview.states):
            self._unchanged.forget("lost")  # as in NodeLink: the group opens
        elif BEAT * self._unchanged.count("lost", (id(link), link.turns)) >= VANISHED:
            return self._without_store(link)
        return None

    @property
    def failure(self) -> Heartbeat | None:
        """The first failure, if another node has announced it and this rank leads."""
        return self.link.failure if self.link else None

    @property
    def leads(self) -> bool:
        """Whether this rank leads its node."""
        return self.link is not None or (self.runtime.nodes == 1 and self._leads())

    def everyone(self) -> Overview | None:
        """Return the last overview of all ranks; None on a single node, or before the first overview."""
        record = self.board.read(OVERVIEW)
        return Overview.from_record(record) if record else None

    def stop(self, ended: bool) -> None:
        """Do not lead any more. `ended`: the node leaves normally."""
        if self.link is not None:
            self.link.stop(ended)
            self.link = None

    def _leads(self) -> bool:
        """Whether no rank before this one on the node is awake."""
        before = {local: self.board.read(RANKS + local) for local in range(self.runtime.local_rank)}
        still = [self._unchanged.count(local, beat and beat["beat"]) for local, beat in before.items()]
        return all(looks >= FROZEN for looks in still)

    def _without_store(self, link: NodeLink) -> Found | None:
        host, port = self.runtime.master or ("?", 0)
        what = f"the ranks' store at {host}:{port} is lost ({link.error}): its node is down, or this one is cut off"
        own = self.board.heartbeats()
        return (link.first or own[0], what) if own else None
