"""One simulated launch of scale_sim.py: its processes, its store, and the all-reduce between the processes."""

import contextlib
import json
import multiprocessing
import os
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from ddp_lab.world.process import Place
from scripts.scale_ranks import Spec, run

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["scripts.scale_ranks"]  # what its server imports before it forks processes
PROCESSES = 64  # at most, besides that of node 0 and those of the node with the faults
LIMIT = 240.0  # seconds that anything may take


@dataclass
class Counts:
    """What all ranks have done.

    Attributes:
        store: operations of the store, by prefix: "attempt" until all ranks have started, "" at start and end, "nodes" those of
            heartbeats and failures.
        size: bytes of their keys and values.
        files: operations on files in the shared directory, by kind.
        memory: bytes that the processes use and do not share.
    """

    store: Counter[str] = field(default_factory=Counter)
    size: int = 0
    files: Counter[str] = field(default_factory=Counter)
    memory: int = 0

    @property
    def operations(self) -> int:
        """Number of store operations."""
        return self.store.total()

    @property
    def file_operations(self) -> int:
        """Number of operations on files in the shared directory."""
        return self.files.total()

    def minus(self, before: "Counts") -> "Counts":
        """Return what was done since `before`."""
        return Counts(self.store - before.store, self.size - before.size, self.files - before.files, self.memory)


@dataclass
class Process:
    """A process, and the pipe to it."""

    ranks: list[Place]
    pipe: Connection
    process: Any


class Launch:
    """One simulated launch.

    Args:
        folder: of this launch; the shared directory is in it.

    Attributes:
        faulty: the places on the node whose ranks are processes of their own, so that they can be killed.
        events: by name ("trains", "knows", "stops", "ends") the Unix time at which it happened, by rank.
    """

    def __init__(self, ranks: int, nodes: int, folder: Path, step_seconds: float, timeout: float):
        local = ranks // nodes
        places = [Place(rank, ranks, rank % local, local, rank // local, nodes) for rank in range(ranks)]
        together = -(-nodes // PROCESSES)  # nodes in one process
        groups = [places[i : i + together * local] for i in range(local, ranks, together * local)]
        self.faulty = [place for place in places if place.node == nodes // 2]
        groups = [[place for place in group if place not in self.faulty] for group in [places[:local], *groups]]
        groups += [[place] for place in self.faulty]
        self.size, self.runs_dir = ranks, folder / "runs"
        self.events: dict[str, dict[int, float]] = {name: {} for name in ("trains", "knows", "stops", "ends")}
        self._counts: list[Counts] = []
        self._sending = threading.Lock()
        self._given: dict[int, list[list[float]]] = {}
        listener = socket.create_server(
            ("127.0.0.1", 0), backlog=4096
        )  # not IPv6, whose addresses would be looked up in the DNS
        port = listener.getsockname()[1]
        self.store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.started = time.time()
        self.processes: list[Process] = []
        for group in filter(None, groups):
            ours, theirs = CONTEXT.Pipe()
            spec = Spec(group, port, str(self.runs_dir), step_seconds, timeout)
            process = CONTEXT.Process(target=run, args=(spec, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(Process(group, ours, process))
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        pipes = {process.pipe for process in self.processes}
        while pipes:
            for pipe in cast("list[Connection]", wait(list(pipes))):
                try:
                    what, *values = pipe.recv()
                except (EOFError, OSError):
                    pipes.discard(pipe)
                    continue
                if what == "counts":
                    self._counts.append(Counts(*values))
                elif what == "reduce":
                    self._reduce(*values)
                else:
                    self.events[what][values[0]] = values[1]

    def _reduce(self, number: int, values: list[float]) -> None:
        given = self._given.setdefault(number, [])
        given.append(values)
        if len(given) == len(self.processes):
            del self._given[number]
            self.tell("result", number, [max(column) for column in zip(*given, strict=True)])

    def tell(self, *message: Any, rank: int | None = None) -> None:
        """Send a message to all processes, or to that of a rank."""
        for process in self.processes:
            if rank is None or any(place.rank == rank for place in process.ranks):
                with contextlib.suppress(OSError), self._sending:  # it was killed
                    process.pipe.send(message)

    def signal(self, number: int, places: list[Place]) -> None:
        """Send a signal to the processes of some ranks of the node with the faults."""
        for process in self.processes:
            if process.ranks[0] in places and process.process.is_alive():
                os.kill(process.process.pid, number)

    def await_event(self, name: str, ranks: int) -> float:
        """Wait until an event has happened on so many ranks. Return when it happened on the last of them.

        Raises:
            TimeoutError: it does not.
        """
        deadline = time.monotonic() + LIMIT
        while len(self.events[name]) < ranks:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name}: {len(self.events[name])} of {ranks} ranks after {LIMIT:g} s")
            time.sleep(0.02)
        return max(self.events[name].values())

    def count(self, without: list[Place]) -> Counts:
        """Return what the ranks have done so far, but for the processes of some ranks, which may be dead."""
        self._counts = []
        counted = [process for process in self.processes if process.ranks[0] not in without]
        for process in counted:
            with self._sending:
                process.pipe.send(("count",))
        deadline = time.monotonic() + LIMIT
        while len(self._counts) < len(counted) and time.monotonic() < deadline:
            time.sleep(0.02)
        total = Counts()
        for one in list(self._counts):
            total.size, total.memory = total.size + one.size, total.memory + one.memory
            total.store.update(one.store)
            total.files.update(one.files)
        return total

    def failure(self) -> dict[str, Any]:
        """Return the content of failure.json."""
        return json.loads((self.runs_dir / "run" / "failure.json").read_text())

    def end(self) -> None:
        """End all processes that are left."""
        for process in self.processes:
            process.process.kill()
        for process in self.processes:
            process.process.join()
            process.pipe.close()
