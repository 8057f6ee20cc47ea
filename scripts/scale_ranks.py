"""Simulated ranks for scale_sim.py: threads with the control plane of ddp_lab.

They sleep where a rank would compute.

Start, agreement, watchdog, exchanges, run directory and store are those of ddp_lab. Simulated are
the steps (sleep), the all-reduce (over pipes to scale_sim.py) and what would end the process of a
rank (its thread ends instead). Operations on files are those that Python reports to its audit
hooks, which are all but `stat`.
"""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.futures import Future

from ddp_lab.config.types import Every
from ddp_lab.launchers.preflight import check_network, check_shared
from ddp_lab.resilience.guard import Requests
from ddp_lab.resilience.run_directory import RunDir
from ddp_lab.resilience.watchdog import BEAT, Watchdog
from ddp_lab.strategies.base import Strategy
from ddp_lab.tasks.base import Task
from ddp_lab.training.metrics import RunningSums
from ddp_lab.training.progress import Progress
from ddp_lab.training.sync import Sync
from ddp_lab.world.process import RankInfo
from ddp_lab.world.runtime import Runtime

FILE_EVENTS = {
    "open",
    "os.listdir",
    "os.scandir",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.rename",
    "os.remove",
    "os.truncate",
}


class Spec(NamedTuple):
    """The ranks of one process and of the simulation.

    It has the ranks' places, the port of the store, the shared directory, and seconds.
    """

    places: list[RankInfo]
    port: int
    runs_dir: str
    step_seconds: float
    timeout: float


class Peers:
    """The all-reduce of this process's ranks among each other and, by the pipe, with other ranks.

    A rank waits in a function of torch, as in a real collective: the watchdog recognises it by
    that.
    """

    def __init__(self, ranks: int, pipe: Connection):
        self.ranks = ranks
        self.pipe = pipe
        self.sending = threading.Lock()
        self._lock = threading.Lock()
        self._rounds: dict[int, tuple[Future[list[float]], list[list[float]]]] = {}

    def send(self, *message: Any) -> None:
        """Send a message to scale_sim.py."""
        with self.sending:
            self.pipe.send(message)

    def maximum(self, number: int, values: list[float]) -> list[float]:
        """Return the element-wise maximum over all ranks.

        All ranks call it with the same `number`.
        """
        with self._lock:
            future, from_ranks = self._rounds.setdefault(number, (Future(), []))
            from_ranks.append(values)
            complete = len(from_ranks) == self.ranks
        if complete:
            self.send("reduce", number, [max(column) for column in zip(*from_ranks, strict=True)])
        return future.wait()

    def deliver(self, number: int, values: list[float]) -> None:
        """Set the result that scale_sim.py has sent."""
        with self._lock:
            future, _ = self._rounds.pop(number)
        future.set_result(values)


class CountedStore:
    """A connection to a store that counts its requests, and the bytes of their keys and values."""

    def __init__(self, base: Any, prefix: str, connections: list["CountedStore"]):
        self.base = base
        self.prefix = prefix
        self.operations = 0
        self.size = 0
        connections.append(self)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            answer = getattr(self.base, name)(*values)
            self.operations += 1
            sent = [
                each
                for value in (*values, answer)
                for each in (value if isinstance(value, list) else [value])
            ]
            self.size += sum(len(each) for each in sent if isinstance(each, str | bytes))
            return answer

        return call


class SimulatedRuntime(Runtime):
    """A runtime whose process group is simulated, and which counts what goes through the store.

    Its all-reduce is the maximum, whatever the operation: where ddp_lab adds flags and a number of
    rank 0, it is as good.
    """

    def __init__(self, rank_info: RankInfo, peers: Peers):
        super().__init__("cpu", timeout=300, rank_info=rank_info)
        self.peers = peers
        self.reduced = 0
        self.connections: list[CountedStore] = []

    @property
    def store(self) -> Any:
        if self._store is None:
            self._store = cast(Any, CountedStore(super().store, "", self.connections))
        return self._store

    def connect(self, prefix: str) -> Any:
        return CountedStore(
            dist.PrefixStore(prefix, self.store.base.clone()), prefix, self.connections
        )

    def _attempt(self, store: Any) -> str:  # counted apart: it depends on how long this rank waits
        return super()._attempt(CountedStore(store, "attempt", self.connections))  # pyright: ignore[reportArgumentType]

    def all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX
    ) -> torch.Tensor:
        self.reduced += 1
        return tensor.copy_(
            torch.tensor(self.peers.maximum(self.reduced, tensor.tolist()), dtype=tensor.dtype)
        )


class Looks:
    """The thread in which all watchdogs of a process look, one after another, every BEAT seconds.

    A thread of each watchdog, as in a real rank, would cost more processor time for waking up than
    for looking.
    """

    def __init__(self) -> None:
        self.watching: set[Watchdog] = set()
        self.lock = threading.Lock()
        threading.Thread(target=self._run, name="looks", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(BEAT)
            for watchdog in list(self.watching):
                with self.lock:
                    if watchdog in self.watching and watchdog.look():
                        self.watching.remove(watchdog)


class SimulatedWatchdog(Watchdog):
    """A watchdog that looks in the thread of `looks`, and reports when it learns of a failure.

    It is its own thread: `start` lets it look, and `join` look no more.
    """

    def __init__(self, run_dir: RunDir, runtime: SimulatedRuntime, timeout: float, looks: Looks):
        super().__init__(run_dir, runtime, timeout)
        self.peers = runtime.peers
        self.looks = looks
        self._thread = cast(threading.Thread, self)

    def start(self) -> None:
        with self.looks.lock:
            self.looks.watching.add(self)

    def join(self) -> None:
        with self.looks.lock:
            self.looks.watching.discard(self)

    def leave(self, grace: float) -> None:
        self.peers.send("knows", self.rank, time.time())


class Rank:
    """One simulated rank; with `hangs` it hangs in its next step."""

    def __init__(self, spec: Spec, rank_info: RankInfo, peers: Peers, looks: Looks):
        self.spec = spec
        self.peers = peers
        self.looks = looks
        self.runtime = SimulatedRuntime(rank_info, peers)
        self.requests = Requests(self.runtime)
        self.hangs = False
        threading.Thread(target=self._run, name=f"rank {rank_info.rank}", daemon=True).start()

    def _run(self) -> None:
        runtime = self.runtime
        spec = self.spec
        check_network(runtime)
        runtime.broadcast_from_rank0("source", lambda: None)
        runtime.gather_objects("dataset", "0" * 64)
        runtime.broadcast_from_rank0("same dataset", lambda: None)
        check_shared(Path(spec.runs_dir), runtime)
        run_dir = RunDir(runtime, Path(spec.runs_dir), "run", "auto", "simulated")
        watchdog = SimulatedWatchdog(run_dir, runtime, spec.timeout, self.looks)
        watchdog.__enter__()  # leaving it would end the process
        runtime.all_reduce(torch.zeros(1))  # where the process group opens, which needs all ranks
        self.peers.send("trains", runtime.rank, time.time())
        # Of a strategy the exchanges need no more than this. Whatever is not the same on all ranks
        # they only compare with 0.
        strategy = cast(
            Strategy, SimpleNamespace(runtime=runtime, device=runtime.device, is_metric_rank=True)
        )
        sync = Sync(
            strategy,
            RunningSums(Task(), runtime.device),
            Every(),
            lambda: (self.requests.preempted,),
        )
        step = self._train(watchdog, sync)
        self.peers.send("stops", runtime.rank, time.time())
        if runtime.rank == 0:
            run_dir.end("preempted", Progress(step=step))
        watchdog.stop()
        self.peers.send("ends", runtime.rank, time.time())

    def _train(self, watchdog: Watchdog, sync: Sync) -> int:
        """Take steps until the ranks agree to stop, and return their number."""
        step = 0
        sync.begin(Progress())
        sync.begin_epoch(Progress())
        while True:
            step += 1
            watchdog.heartbeat.at("loading", 1, step)
            watchdog.heartbeat.at("training", 1, step)
            if self.hangs:
                time.sleep(3600)
            time.sleep(self.spec.step_seconds)
            self.runtime.all_reduce(torch.zeros(1))
            if step >= sync.next:
                watchdog.heartbeat.at("deciding")
                exchanged = sync.after_step(Progress(step=step), 0.0)
                if exchanged is not None and any(exchanged.flags):
                    return step


def run(spec: Spec, pipe: Connection) -> None:
    """Run the ranks of a process, and do what scale_sim.py asks for, until it closes the pipe."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(spec.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    # torch looks up the address of the store's host for every connection
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    torch.set_num_threads(1)
    if spec.places[0].node > 0:
        # node 0 and the store, on which all others depend, have a machine of their own in a real
        # launch
        os.nice(5)
    threading.stack_size(512 * 1024)
    # otherwise each of the threads that wait for the interpreter's lock wakes up every 5 ms
    sys.setswitchinterval(0.1)
    files: Counter[str] = Counter()

    def count(event: str, values: tuple[Any, ...]) -> None:
        if (
            event in FILE_EVENTS
            and isinstance(values[0], str | os.PathLike)
            and os.fspath(values[0]).startswith(spec.runs_dir)
        ):
            files[event] += 1

    sys.addaudithook(count)
    peers = Peers(len(spec.places), pipe)
    looks = Looks()
    ranks = {rank_info.rank: Rank(spec, rank_info, peers, looks) for rank_info in spec.places}
    while True:
        try:
            command, *values = pipe.recv()
        except EOFError:
            os._exit(0)
        if command == "result":
            peers.deliver(*values)
        elif command == "hang":
            ranks[values[0]].hangs = True
        elif command == "preempt":
            ranks[values[0]].requests.preempted = True  # as its signal handler does
        elif command == "count":
            connections = [each for rank in ranks.values() for each in rank.runtime.connections]
            operations = sum(
                (Counter({each.prefix: each.operations}) for each in connections), Counter[str]()
            )
            peers.send("counts", operations, sum(each.size for each in connections), files.total())
