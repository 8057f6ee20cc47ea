"""The heartbeats between nodes: one rank of each node sends its node's through the store, and reads one overview of all.

node N   every second   set node/N = overview of its ranks                  get overview, failure
node 0   every second   multi_get node/0 ... node/127 -> merge -> set overview

In all, two operations per node and second, and two more on node 0. A node whose heartbeat does not change has vanished.
"""

import json
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ddp_lab.resilience.node_board import Heartbeat
from ddp_lab.resilience.overview import Overview, merge
from ddp_lab.resilience.unchanged import Pace, Unchanged
from ddp_lab.world.runtime import Runtime
from ddp_lab.world.store import CountedStore

PERIOD = 1.0  # seconds between two heartbeats of a node
VANISHED = 7.0  # seconds without a heartbeat after which a node counts as vanished
ANNOUNCE = 3.0  # seconds that announcing a failure may take
PREFIX = "nodes"  # of the keys in the store
# The phase in which the process group opens, which may keep the store of many ranks busy for longer than VANISHED.
STARTING = "starting"


def prepare(runtime: Runtime) -> None:
    """Set all keys, so that no read waits for a node that has not started yet. Collective."""

    def set_keys() -> None:
        keys = ["overview", "failure", *(f"node/{node}" for node in range(runtime.nodes))]
        runtime.store.multi_set([f"{PREFIX}/{key}" for key in keys], [""] * len(keys))

    runtime.agree("nodes", set_keys)


def announce(runtime: Runtime, failure: Heartbeat) -> None:
    """Tell all nodes that the launch has failed. Without an answer of the store nothing is announced."""

    def send() -> None:
        with suppress(RuntimeError):  # torch's errors of a store are subclasses
            runtime.store.connect(PREFIX).set("failure", json.dumps(failure))

    thread = threading.Thread(target=send, name="announce", daemon=True)  # the store may have vanished and never answer
    thread.start()
    thread.join(ANNOUNCE)


class NodeLink:
    """A thread that sends this node's heartbeats and reads the overview of all nodes, over a connection of its own.

    If the store vanishes, the thread waits for it forever, and `turns` does not change any more.

    Args:
        look: returns the overview of this node's ranks.

    Attributes:
        turns: number of heartbeats sent.
        overview: the last overview of all ranks; None before the first.
        failure: the heartbeat of the rank that has failed first; None if the launch has not failed.
        vanished: the last heartbeat of the rank with the least progress on a node that has vanished; None if none has.
        first: the same of node 0; None before the first overview.
        error: why the store does not answer, if it says so.
    """

    def __init__(self, runtime: Runtime, look: Callable[[], Overview]):
        self.runtime, self.look = runtime, look
        self.turns = 0
        self.overview: Overview | None = None
        self.failure: Heartbeat | None = None
        self.vanished: Heartbeat | None = None
        self.first: Heartbeat | None = None
        self.error = "it does not answer"
        self._unchanged = Unchanged()
        self._stop, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def stop(self, ended: bool) -> None:
        """Stop the thread. `ended`: the node leaves normally, so its heartbeats need not be expected any more."""
        self._ended = ended
        self._stop.set()
        self._thread.join(ANNOUNCE)
        if self._thread.is_alive():
            self.runtime.abandoned.append(self._thread)

    def _run(self) -> None:
        try:
            store = self.runtime.store.connect(PREFIX)
            pace = Pace(PERIOD)
            while True:
                self._turn(store)
                if pace.wait(self._stop):
                    break
            if self._ended:
                self._send(store)
                if self.runtime.node == 0:
                    self._publish(store)
        except RuntimeError as error:  # as above
            self.error = str(error).splitlines()[0]

    def _turn(self, store: CountedStore) -> None:
        self._send(store)
        if self.runtime.node == 0:
            self._publish(store)
        overview, failure = store.multi_get(["overview", "failure"])
        if failure:
            self.failure = json.loads(failure)
        if overview:
            self._read(json.loads(overview))
        self.turns += 1

    def _send(self, store: CountedStore) -> None:
        record = {**asdict(self.look()), "turns": self.turns, "ended": self._ended}
        store.set(f"node/{self.runtime.node}", json.dumps(record))

    def _publish(self, store: CountedStore) -> None:
        """Merge the overviews of all nodes on node 0, and set that of all ranks."""
        values = store.multi_get([f"node/{node}" for node in range(self.runtime.nodes)])
        records = {node: json.loads(value) for node, value in enumerate(values) if value}
        for node, record in records.items():
            if self._has_vanished(node, values[node], record):
                self.vanished = record["least"][0]
        everyone = merge(Overview.from_record(record) for record in records.values())
        first = records[0]["least"][0]
        store.set("overview", json.dumps({**asdict(everyone), "turns": self.turns, "ended": self._ended, "first": first}))

    def _read(self, record: dict[str, Any]) -> None:
        """Take over the overview that node 0 has set, and notice if it sets none any more."""
        self.overview, self.first = Overview.from_record(record), record["first"]
        if self._has_vanished("overview", record["turns"], record):
            self.vanished = self.first

    def opening(self, states: Collection[str]) -> bool:
        """Return whether the process group opens, according to an overview and to this node's own ranks.

        All ranks open it together. If this node's ranks have, an overview in which others have not is from before.
        """
        return STARTING in states and STARTING in self.look().states

    def _has_vanished(self, key: int | str, value: Any, record: dict[str, Any]) -> bool:
        if record["ended"] or self.opening(record["states"]):
            self._unchanged.forget(key)  # the looks until the group is open do not count afterwards
            return False
        return self._unchanged.count(key, value) * PERIOD >= VANISHED
