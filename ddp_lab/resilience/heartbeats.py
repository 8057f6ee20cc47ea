"""The table of heartbeats: what the ranks do, as each node knows it.

node 0                                      node 1 ... node 127
rank 0   rank 1 ... rank 7                  rank 8   rank 9 ... rank 15
  |________|__________|   table in memory     |________|__________|
  |                                           |
  '---- overview of the node, every second ----'       through torchrun's store

Within a node each rank has a row of a file in memory. Between nodes, a thread of one rank of each
node copies rows:

node N   every second   set node/N = overview of its ranks                  get overview, failure
node 0   every second   multi_get node/0 ... node/127 -> merge -> set overview

In all, two operations per node and second, and two more on node 0. Nothing of this is on a disk
that nodes share.
"""

import json
import mmap
import os
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_lab.config.errors import ConfigError, FailureKind

# `ddp-lab watch` reads heartbeats, too: importing torch would add 1.5 s
if TYPE_CHECKING:
    # Documented as torch.distributed.Store, but the module does not export it explicitly.
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from ddp_lab.world.runtime import Runtime

ROW = 8192  # bytes
# The end of the row of a rank: epoch, step, number of its phase and when it began. The main thread
# writes them twice in a step, which takes 1 us in memory, and 50 us as JSON to a file.
PLACE = struct.Struct("<qqqd")
# the first rows, the same on all nodes: the first failure, and the slowest of all ranks
SHARED = ["failure", "overview"]
PERIOD = 1.0  # seconds between two heartbeats of a node
VANISHED = 7.0  # seconds without a heartbeat after which a node counts as vanished
STOP = 3.0  # seconds that the last exchange with the store may take
LISTED = 8  # the most ranks that a message lists one by one
STARTING = "starting"  # the phase in which the process group opens
PHASES = [
    STARTING,
    "preparing",
    "compiling",
    "loading",
    "training",
    "finishing",
    "deciding",
    "saving",
    "evaluating",
    "done",
]
NUMBERS = {phase: number for number, phase in enumerate(PHASES, start=1)}
NAMES = {number: phase for phase, number in NUMBERS.items()}
GONE = (
    f"its node has sent no heartbeat for {VANISHED:g} s: it is down or cut off, or all its "
    "processes are killed or suspended"
)

# of a rank: rank, host, pid, epoch, step, doing, since, beat, waits, called, call
Heartbeat = dict[str, Any]
Failure = tuple[Heartbeat, FailureKind, str]  # the rank that failed, and what happened to it


def suspicion(heartbeat: Heartbeat) -> tuple[int, bool, int, float]:
    """Return the sort key of a rank in a hang: the others wait for that with the smallest key.

    That is the rank with the least progress. In the same step, ranks that wait in a collective are
    sorted last: a rank can hang after a collective in which the others still wait for its data.
    """
    return (
        heartbeat["step"],
        heartbeat["waits"],
        PHASES.index(heartbeat["doing"]),
        heartbeat["since"],
    )


def lacks(beat: Heartbeat, call: dict[str, Any] | None) -> bool:
    """Return whether the rank with this heartbeat lacks a call that another rank has made."""
    return call is not None and beat["called"].get(call["group"], call["number"]) < call["number"]


def find_suspect(everyone: Sequence[Heartbeat]) -> Heartbeat:
    """Return the heartbeat of the rank for which the others wait in a hang.

    It is that with the least progress, or one that lacks the collective in which that rank waits.

    Args:
        everyone: at least one, as `least` returns them.
    """
    first = everyone[0]
    return next((beat for beat in everyone if lacks(beat, first["call"])), first)


class StalenessCounter(dict[Any, tuple[Any, int]]):
    """Counts how many looks in succession have found the same value.

    Time is counted in looks and not read from a clock: while the process that looks is suspended,
    nothing is counted.
    """

    def count(self, key: Any, value: Any) -> int:
        """Look at the value of `key`, and return how many looks before have found the same one."""
        before, looks = self.get(key, (value, -1))
        self[key] = value, looks + 1 if before == value else 0
        return self[key][1]


def least(heartbeats: Iterable[Heartbeat]) -> list[Heartbeat]:
    """Return the heartbeats of ranks with the least progress, least first, and the most.

    At most LISTED ranks have the least.

    The rank with the most progress may have skipped a collective in which all others wait. This
    overview of ranks has the same size for any number of them.
    """
    ranks = sorted(heartbeats, key=suspicion)
    return ranks[:LISTED] + ranks[LISTED:][-1:]


class Table:
    """The table of this node, a file in its memory.

    Collective: the first rank of each node creates it.

    The file has a name only until all ranks have opened it, so nothing remains of a launch that is
    killed later. The keys that NodeLink reads from the store are set then, so that no read waits
    for a node. A row is one of SHARED, or the number of a rank on this node. It is JSON; at the end
    of that of a rank is its place, which counts in place of that in the JSON.

    Attributes:
        path: under which this user's processes find it while this rank runs, on Linux.

    Raises:
        ConfigError: the file cannot be created.
    """

    def __init__(self, runtime: "Runtime"):
        self.size = runtime.local_world_size
        path = str(runtime.broadcast_from_rank0("heartbeats", self._create, per_node=True))
        self._file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._file)
        runtime.gather_objects("heartbeats opened", "")  # on rank 0 it waits for the others
        keys = []
        if runtime.nodes > 1:
            keys = [f"nodes/{key}" for key in (*SHARED, *range(runtime.nodes))]

        if keys and runtime.is_main:
            runtime.store.multi_set(keys, [""] * len(keys))  # pyright: ignore[reportAttributeAccessIssue]  # not in its stubs
        elif keys and runtime.local_rank == 0:
            from ddp_lab.world.ranks import DECISION_TIMEOUT

            runtime.store.wait(keys, DECISION_TIMEOUT)
        if runtime.local_rank == 0:
            os.unlink(path)
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._file}")

    def _create(self) -> str:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        try:
            # mode 0600, a random name
            with tempfile.NamedTemporaryFile(prefix="ddp_lab-", dir=folder, delete=False) as file:
                # now, so that no write fails later for lack of memory
                file.write(bytes(ROW * (len(SHARED) + self.size)))
        except OSError as error:
            from ddp_lab.world.write_errors import explain_write

            reason, remedy = explain_write(error, Path(folder))
            raise ConfigError(
                f"{folder}: cannot create the file of the heartbeats there ({reason}). {remedy}"
            ) from None
        return file.name

    def write(self, row: str | int, record: dict[str, Any]) -> None:
        """Write a row."""
        text = json.dumps(record).encode()[: ROW - PLACE.size - 1]
        os.pwrite(self._file, text + b"\n", start_of(row))

    def in_memory(self) -> mmap.mmap:
        """Return the file as memory, for a rank that writes its place often."""
        return mmap.mmap(self._file, start_of(self.size))

    def read(self, row: str | int) -> dict[str, Any] | None:
        """Return the content of a row; None if nothing was written."""
        return read_row(self._file, row)

    def heartbeats(self) -> list[Heartbeat]:
        """Return the heartbeats of the node's ranks that have one, in order of local rank."""
        return [beat for beat in map(self.read, range(self.size)) if beat]

    def everyone(self) -> list[Heartbeat]:
        """Return those with the `least` progress of all ranks.

        What ranks of other nodes did is up to two seconds old.
        """
        record = self.read("overview")
        return record["ranks"] if record else least(self.heartbeats())


class OwnHeartbeat:
    """The heartbeat of this rank, in its row of the table.

    The main thread writes the place of the rank, and the watchdog's thread the rest.

    Attributes:
        record: what is written.
    """

    def __init__(self, table: Table, row: int, record: Heartbeat):
        self.record = record
        self._table = table
        self._row = row
        self._memory = table.in_memory()
        self._end = start_of(row + 1) - PLACE.size
        self._write_place()

    def at(self, doing: str, epoch: int | None = None, step: int | None = None) -> None:
        """Record progress: the main thread enters a phase of PHASES at this epoch and step.

        This costs a few microseconds per step. If the rank is killed, the table has its last phase.
        """
        if epoch is not None:
            self.record["epoch"] = epoch
        if step is not None:
            self.record["step"] = step
        self.record["doing"] = doing
        self.record["since"] = time.time()
        self._write_place()

    def _write_place(self) -> None:
        record = self.record
        phase = NUMBERS[record["doing"]]
        PLACE.pack_into(
            self._memory, self._end, record["epoch"], record["step"], phase, record["since"]
        )

    def write(self) -> None:
        """Write the record."""
        self._table.write(self._row, self.record)


def read_row(file: int, row: str | int) -> dict[str, Any] | None:
    """Return the content of a row of a table's file; None if nothing was written.

    Args:
        file: descriptor of the file.
        row: as in `Table`.
    """
    for _ in range(2):  # a row that is just being written may be read in parts of two records
        with suppress(ValueError):
            content = os.pread(file, ROW, start_of(row))
            record = json.loads(content.partition(b"\n")[0])
            return record if isinstance(row, str) else at_its_place(record, content)
    return None


def at_its_place(record: Any, content: bytes) -> Any:
    """Return the record of a rank with the place that is at the end of its row."""
    epoch, step, phase, since = PLACE.unpack(content[-PLACE.size :])
    name = NAMES.get(phase)
    if name is None or not isinstance(record, dict):  # no rank has written its place
        return record
    return record | {"epoch": epoch, "step": step, "doing": name, "since": since}


def start_of(row: str | int) -> int:
    """Return the place of a row in the file, in bytes."""
    return ROW * (SHARED.index(row) if isinstance(row, str) else len(SHARED) + row)


class NodeLink(threading.Thread):
    """A thread that copies rows between this node's table and the store, by its own connection.

    Attributes:
        vanished: on node 0, the rank with the least progress on a node that has vanished; None if
            none has.
    """

    def __init__(self, runtime: "Runtime", table: Table):
        super().__init__(name="nodes", daemon=True)
        self.runtime = runtime
        self.table = table
        self.vanished: Heartbeat | None = None
        self._nodes = StalenessCounter()
        self._looks = StalenessCounter()
        self._last = threading.Event()  # the next exchange is the last one

    def stop(self) -> None:
        """Stop the thread after one more exchange.

        By it the others learn of a failure, or that this rank is done.
        """
        self._last.set()
        self.join(STOP)
        if self.is_alive():
            self.runtime.abandoned.append(self)

    def run(self) -> None:
        """Exchange rows every PERIOD seconds, until the store does not answer any more."""
        with suppress(RuntimeError):  # torch's errors of a store are subclasses
            store = self.runtime.connect("nodes")
            last = False
            while not last:
                last = self._last.is_set()
                self.exchange(store)
                self._last.wait(PERIOD)

    def exchange(self, store: "Store") -> None:
        """Send what this node knows, and read what the others know."""
        ranks = self.table.heartbeats()
        phases = {beat["doing"] for beat in ranks}
        # The time makes each record another one; the clocks of nodes are never compared.
        record = {"sent": time.time(), "ranks": least(ranks), "done": "done" in phases}
        store.set(f"{self.runtime.node}", json.dumps(record))
        if self.runtime.node == 0:
            store.set("overview", json.dumps(record | self._merge(store, STARTING in phases)))
        failure, overview = store.multi_get(SHARED)
        if overview:
            self.table.write("overview", json.loads(overview))
        if failure:
            self.table.write("failure", json.loads(failure))
        elif own_failure := self.table.read("failure"):
            store.set("failure", json.dumps(own_failure))

    def _merge(self, store: "Store", starting: bool) -> dict[str, Any]:
        """Return the overview of all nodes, and notice nodes that have vanished."""
        values = store.multi_get([str(node) for node in range(self.runtime.nodes)])
        nodes = {node: json.loads(value) for node, value in enumerate(values) if value}
        for node, record in nodes.items():
            # the process group opens, which may keep the store of many ranks busy for longer than
            # VANISHED
            if starting:
                self._nodes.clear()
            elif self._nodes.count(node, values[node]) * PERIOD >= VANISHED and not record["done"]:
                self.vanished = record["ranks"][0]

        ranks = least(chain.from_iterable(record["ranks"] for record in nodes.values()))
        return {
            "ranks": ranks,
            "done": any(record["done"] for record in nodes.values()),
            "first": nodes[0]["ranks"][0],
        }

    def find_lost(self, looks: float) -> Failure | None:
        """Return a rank of the node that has vanished, if one has, and what is known.

        Call it `looks` times per second.

        Node 0 notices that another node sends no heartbeats; the others notice that node 0 sends no
        overview.
        """
        overview = self.table.read("overview")
        # as in `_merge`
        if overview is None or any(beat["doing"] == STARTING for beat in self.table.heartbeats()):
            self._looks.clear()
            return None
        if self.vanished:
            return self.vanished, "lost_node", GONE

        if self._looks.count("overview", overview["sent"]) / looks < VANISHED or overview["done"]:
            return None
        host, port = self.runtime.master
        return (
            overview["first"],
            "lost_node",
            f"{GONE}; or this node is cut off from the ranks' store at {host}:{port}",
        )
