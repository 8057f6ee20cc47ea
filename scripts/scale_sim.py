"""Run the control plane of a thousand ranks on one machine.

Measure its traffic and how fast it notices failures.

python scripts/scale_sim.py --ranks 1024 --nodes 128
python scripts/scale_sim.py --ranks 16 --nodes 4 --seconds 5

The ranks are threads of a few processes (scale_ranks.py), with their own connections to a real
store. Start-up, agreement, heartbeats, failure reports, preemption and the run directory are
ddp_lab's own code; the training is simulated. Five launches are made: one without a fault, which is
preempted after `--seconds`, one in which a rank is killed, one in which all processes of a node
are, one in which a rank hangs, and one in which a node's first rank is suspended. Exit code 1:
another is blamed.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddp_lab.world.process import RankInfo
from scripts.scale_ranks import Spec, run

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["scripts.scale_ranks"]  # what its server imports before it forks processes
PROCESSES = 64  # at most, besides that of node 0 and those of the node with the faults
LIMIT = 240.0  # seconds that anything may take
TIMEOUT = 10.0  # of the watchdog, in seconds


class Counts(NamedTuple):
    """What all ranks have done.

    Attributes:
        store: operations of the store, by prefix: "attempt" until all ranks have started, "" at
            start and end, "nodes" those of heartbeats and failures.
        size: bytes of their keys and values.
        files: operations on files in the shared directory.
    """

    store: Counter[str]
    size: int
    files: int

    def minus(self, before: "Counts") -> "Counts":
        """Return what was done since `before`."""
        return Counts(self.store - before.store, self.size - before.size, self.files - before.files)


class Training(NamedTuple):
    """What was measured without a fault.

    What was done until all ranks train, then, and from a preemption on; how long the first took,
    and how long the ranks took to agree to stop.
    """

    start_seconds: float
    start: Counts
    training: Counts
    end: Counts
    preempted_seconds: float


class Failure(NamedTuple):
    """What was measured with a fault.

    Seconds until it was reported and until all ranks knew, from the fault or from the watchdog's
    timeout on; what the other ranks did meanwhile; and the report.
    """

    reported_seconds: float
    known_seconds: float
    counts: Counts
    message: str


class Fault(NamedTuple):
    """A fault: its `kind` in failure.json, the ranks, and the signal.

    It happens to these ranks of a node, whose processes receive the signal.

    Without a signal they hang in their next step. A hang is reported after the watchdog's timeout.
    """

    name: str
    kind: str
    victims: slice
    signal: int | None


FAULTS = [
    Fault("rank killed", "lost_rank", slice(1, 2), signal.SIGKILL),
    Fault("node vanished", "lost_node", slice(None), signal.SIGKILL),
    Fault("rank hangs", "hang", slice(-1, None), None),
    # the first of its node, which leads it
    Fault("rank suspended", "hang", slice(1), signal.SIGSTOP),
]


class Launch:
    """One simulated launch: its processes, its store, and the all-reduce between the processes.

    Attributes:
        faulty: the places on the node whose ranks are processes of their own, so that they can be
            killed.
        events: by name ("trains", "knows", "stops", "ends") the Unix time at which it happened, by
            rank.
    """

    def __init__(self, ranks: int, nodes: int, folder: Path, step_seconds: float, timeout: float):
        local = ranks // nodes
        places = [
            RankInfo(rank, ranks, rank % local, local, rank // local, nodes)
            for rank in range(ranks)
        ]
        together = -(-nodes // PROCESSES)  # nodes in one process
        groups = [places[i : i + together * local] for i in range(local, ranks, together * local)]
        self.faulty = [place for place in places if place.node == nodes // 2]
        groups = [
            [place for place in group if place not in self.faulty]
            for group in [places[:local], *groups]
        ]
        groups += [[place] for place in self.faulty]
        self.size = ranks
        self.runs_dir = folder / "runs"
        self.events: dict[str, dict[int, float]] = {
            name: {} for name in ("trains", "knows", "stops", "ends")
        }
        self._counts: list[Counts] = []
        self._sending = threading.Lock()
        self._from_ranks: dict[int, list[list[float]]] = {}
        # not IPv6, which would be looked up in the DNS
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        port = listener.getsockname()[1]
        self.store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.started = time.time()
        self.processes: list[tuple[list[RankInfo], Connection, Any]] = []
        for group in filter(None, groups):
            ours, theirs = CONTEXT.Pipe()
            spec = Spec(group, port, str(self.runs_dir), step_seconds, timeout)
            process = CONTEXT.Process(target=run, args=(spec, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append((group, ours, process))
        self._receiver = threading.Thread(target=self._receive, daemon=True)
        self._receiver.start()

    def _receive(self) -> None:
        pipes = {pipe for _, pipe, _ in self.processes}
        while pipes:
            for pipe in cast("list[Connection]", wait(list(pipes))):
                try:
                    command, *values = pipe.recv()
                except (EOFError, OSError):
                    pipes.discard(pipe)
                    continue
                if command == "counts":
                    self._counts.append(Counts(*values))
                elif command == "reduce":
                    self._reduce(*values)
                else:
                    self.events[command][values[0]] = values[1]

    def _reduce(self, number: int, values: list[float]) -> None:
        from_ranks = self._from_ranks.setdefault(number, [])
        from_ranks.append(values)
        if len(from_ranks) == len(self.processes):
            del self._from_ranks[number]
            self.tell("result", number, [max(column) for column in zip(*from_ranks, strict=True)])

    def tell(self, *message: Any, rank: int | None = None) -> None:
        """Send a message to all processes, or to that of a rank."""
        for places, pipe, _ in self.processes:
            if rank is None or any(place.rank == rank for place in places):
                with contextlib.suppress(OSError), self._sending:  # it was killed
                    pipe.send(message)

    def signal(self, number: int, places: list[RankInfo]) -> None:
        """Send a signal to the processes of some ranks of the node with the faults."""
        for group, _, process in self.processes:
            if group[0] in places and process.is_alive():
                os.kill(process.pid, number)

    def await_event(self, name: str, ranks: int) -> float:
        """Wait until an event has happened on so many ranks.

        Return when it happened on the last of them.

        Raises:
            TimeoutError: it does not.
        """
        deadline = time.monotonic() + LIMIT
        while len(self.events[name]) < ranks:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{name}: {len(self.events[name])} of {ranks} ranks after {LIMIT:g} s"
                )
            time.sleep(0.02)
        return max(self.events[name].values())

    def count(self, without: list[RankInfo]) -> Counts:
        """Return what the ranks have done so far; those of `without` may be dead."""
        self._counts = []
        counted = [pipe for places, pipe, _ in self.processes if places[0] not in without]
        for pipe in counted:
            with self._sending:
                pipe.send(("count",))
        deadline = time.monotonic() + LIMIT
        while len(self._counts) < len(counted) and time.monotonic() < deadline:
            time.sleep(0.02)
        made = list(self._counts)
        operations = sum((one.store for one in made), Counter[str]())
        return Counts(operations, sum(one.size for one in made), sum(one.files for one in made))

    def end(self) -> None:
        """End all processes that are left."""
        for _, _, process in self.processes:
            process.kill()
        for _, _, process in self.processes:
            process.join()
        # it ends when all pipes have; closed earlier, they would raise an error in it
        self._receiver.join()
        for _, pipe, _ in self.processes:
            pipe.close()


@contextlib.contextmanager
def launched(
    ranks: int, nodes: int, step_seconds: float = 1.0, timeout: float = TIMEOUT
) -> Generator[Launch]:
    """Return a launch whose ranks all train, in a temporary directory.

    What is left of it is ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        launch = Launch(ranks, nodes, Path(folder), step_seconds, timeout)
        try:
            launch.await_event("trains", ranks)
            yield launch
        finally:
            launch.end()


def train(seconds: float, ranks: int, nodes: int, **options: float) -> Training:
    """Train without a fault, preempt a rank, and wait until all have ended."""
    with launched(ranks, nodes, **options) as launch:
        started = max(launch.events["trains"].values()) - launch.started
        before = launch.count([])
        time.sleep(seconds)
        after = launch.count([])
        asked = time.time()
        launch.tell("preempt", launch.faulty[-1].rank, rank=launch.faulty[-1].rank)
        stopped = launch.await_event("stops", ranks) - asked
        launch.await_event("ends", ranks)
        return Training(
            started, before, after.minus(before), launch.count([]).minus(after), stopped
        )


def fail(
    fault: Fault, ranks: int, nodes: int, step_seconds: float = 1.0, timeout: float = TIMEOUT
) -> Failure:
    """Inject a fault and wait until all ranks know.

    Raises:
        SystemExit: it is reported as something else.
    """
    with launched(ranks, nodes, step_seconds, timeout) as launch:
        time.sleep(3 + 2 * step_seconds)  # several heartbeats of each node
        victims = launch.faulty[fault.victims]
        before = launch.count(victims)
        at = time.time()
        if fault.signal is None:
            launch.tell("hang", victims[0].rank, rank=victims[0].rank)
        else:
            # all of them, so that none reports that another one was killed
            launch.signal(signal.SIGSTOP, victims)
            launch.signal(fault.signal, victims)
        at += timeout if fault.kind == "hang" else 0.0
        known = launch.await_event("knows", ranks - (len(victims) if fault.signal else 0)) - at
        launch.signal(signal.SIGCONT, victims)
        failure = json.loads((launch.runs_dir / "run" / "failure.json").read_text())
        counts = launch.count(victims).minus(before)
    if failure["kind"] != fault.kind or failure["rank"] not in {place.rank for place in victims}:
        sys.exit(
            f"error: {fault.name} on {victims}: reported as {failure['kind']}: {failure['message']}"
        )
    return Failure(failure["time"] - at, known, counts, failure["message"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024, help="number of ranks")
    parser.add_argument(
        "--nodes", type=int, default=128, help="number of nodes; must divide the ranks"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="duration of the training without a fault"
    )
    arguments = parser.parse_args()
    ranks = arguments.ranks
    nodes = arguments.nodes
    if ranks % nodes or ranks < 2 * nodes:
        parser.error(
            f"--ranks {ranks}: each of --nodes {nodes} must have the same number of ranks, 2 or "
            "more"
        )
    os.environ["PYTHONPATH"] = sys.path[0]  # by which the server of forks finds what it imports
    # otherwise a line for every address that has no name
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    CONTEXT.set_forkserver_preload(PRELOAD)
    made = train(arguments.seconds, ranks, nodes)
    print(
        f"start: {made.start_seconds:.1f} s, {made.start.store[''] / ranks:.1f} store operations "
        "per rank, ",
        end="",
    )
    print(f"{made.start.store['attempt'] / ranks:.1f} more while it waits for others, ", end="")
    print(f"{made.start.size / ranks:,.0f} bytes per rank, {made.start.files:,} file operations")
    print(
        f"training: {made.training.store.total() / arguments.seconds:,.0f} store operations/s, ",
        end="",
    )
    print(
        f"{made.training.size / arguments.seconds / 1e3:,.0f} kB/s, {made.training.files:,} file "
        "operations"
    )
    print(f"preemption: agreed after {made.preempted_seconds:.1f} s, to the end ", end="")
    print(
        f"{made.end.store.total() / ranks:.2f} store operations per rank, {made.end.files:,} file "
        "operations",
        flush=True,
    )
    for fault in [fault for fault in FAULTS if nodes > 1 or fault.kind != "lost_node"]:
        failure = fail(fault, ranks, nodes)
        after = f"{TIMEOUT:g} s + " if fault.kind == "hang" else ""
        print(
            f"{fault.name}: reported after {after}{failure.reported_seconds:.1f} s, known "
            "everywhere after ",
            end="",
        )
        print(
            f"{after}{failure.known_seconds:.1f} s, {failure.counts.files} file operations",
            flush=True,
        )


if __name__ == "__main__":
    main()
