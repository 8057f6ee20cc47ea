"""Run the control plane of a thousand ranks on one machine, and measure its traffic and how fast it notices failures.

python scripts/scale_sim.py --ranks 1024 --nodes 128
python scripts/scale_sim.py --ranks 16 --nodes 4 --seconds 5

The ranks are threads of a few processes (scale_ranks.py), with their own connections to a real store. Start-up, agreement,
heartbeats, failure reports, preemption and the run directory are ddp_lab's own code; the training is simulated. Five launches
are made: one without a fault, which is preempted after `--seconds`, one in which a rank is killed, one in which all processes
of a node are, one in which a rank hangs, and one in which the first rank of a node is suspended. Prints what it measures. Exit
code 1 if a failure is not known everywhere, or another rank or node is blamed.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.scale_launch import CONTEXT, PRELOAD, Counts, Launch


@dataclass
class Fault:
    """A fault, and how it must be reported.

    Attributes:
        kind: the `kind` of failure.json; a hang is reported after the watchdog's timeout.
        victims: which ranks of a node it happens to.
        signal: what their processes receive; None: they hang in their next step.
    """

    name: str
    kind: str
    victims: slice
    signal: int | None


FAULTS = [
    Fault("rank killed", "lost_rank", slice(1, 2), signal.SIGKILL),
    Fault("node vanished", "lost_node", slice(None), signal.SIGKILL),
    Fault("rank hangs", "hang", slice(-1, None), None),
    Fault("rank suspended", "hang", slice(1), signal.SIGSTOP),  # the first of its node, which leads it
]


@dataclass
class Training:
    """What was measured in a launch without a fault. Numbers of operations are of all ranks.

    Attributes:
        start_seconds: until all ranks train.
        start, training, end: what was done until then, in `seconds` of training, and from the preemption on.
        preempted_seconds: from the signal until all ranks have agreed to stop.
        memory: of the ranks' processes, in bytes, without what they share.
    """

    start_seconds: float
    start: Counts
    training: Counts
    end: Counts
    preempted_seconds: float
    memory: int


@dataclass
class Failure:
    """What was measured in a launch with a fault.

    Attributes:
        reported_seconds: until failure.json was written, from the fault or from the watchdog's timeout on.
        known_seconds: until all ranks knew.
        counts: what the other ranks did meanwhile.
        message: the report.
    """

    reported_seconds: float
    known_seconds: float
    counts: Counts
    message: str


class Simulation:
    """Makes the launches of one number of ranks and nodes.

    Args:
        seconds: duration of the training without a fault.
        step_seconds: duration of a step.
        timeout: of the watchdog.
        folder: for the launches' directories, which the ranks share.
    """

    def __init__(self, ranks: int, nodes: int, seconds: float, step_seconds: float, timeout: float, folder: Path):
        self.ranks, self.nodes, self.seconds, self.step_seconds, self.timeout = ranks, nodes, seconds, step_seconds, timeout
        self.folder = folder

    def start(self, name: str) -> Launch:
        """Start a launch and wait until all ranks train."""
        launch = Launch(self.ranks, self.nodes, self.folder / name, self.step_seconds, self.timeout)
        launch.await_event("trains", self.ranks)
        return launch

    def train(self) -> Training:
        """Train without a fault, preempt a rank, and wait until all have ended."""
        launch = self.start("preempted")
        try:
            started = max(launch.events["trains"].values()) - launch.started
            before = launch.count([])
            time.sleep(self.seconds)
            after, asked = launch.count([]), time.time()
            launch.tell("preempt", launch.faulty[-1].rank, rank=launch.faulty[-1].rank)
            stopped = launch.await_event("stops", self.ranks) - asked
            launch.await_event("ends", self.ranks)
            end = launch.count([])
        finally:
            launch.end()
        return Training(started, before, after.minus(before), end.minus(after), stopped, after.memory)

    def fail(self, fault: Fault) -> Failure:
        """Inject a fault and wait until all ranks know.

        Raises:
            SystemExit: it is reported as something else.
        """
        launch = self.start(fault.name.replace(" ", "_"))
        try:
            time.sleep(3 + 2 * self.step_seconds)  # several heartbeats of each node
            victims = launch.faulty[fault.victims]
            before, at = launch.count(victims), time.time()
            if fault.signal is None:
                launch.tell("hang", victims[0].rank, rank=victims[0].rank)
            else:
                launch.signal(signal.SIGSTOP, victims)  # all of them, so that none reports that another one was killed
                launch.signal(fault.signal, victims)
            at += self.timeout if fault.kind == "hang" else 0.0
            known = launch.await_event("knows", self.ranks - (len(victims) if fault.signal else 0)) - at
            launch.signal(signal.SIGCONT, victims)
            failure, counts = launch.failure(), launch.count(victims).minus(before)
        finally:
            launch.end()
        if failure["kind"] != fault.kind or failure["rank"] not in {place.rank for place in victims}:
            sys.exit(f"error: {fault.name} on {victims}: reported as {failure['kind']}: {failure['message']}")
        return Failure(failure["time"] - at, known, counts, failure["message"])


@contextmanager
def simulation(
    ranks: int, nodes: int, seconds: float = 60.0, step_seconds: float = 1.0, timeout: float = 10.0
) -> Generator[Simulation]:
    """Return a Simulation in a temporary directory, which is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield Simulation(ranks, nodes, seconds, step_seconds, timeout, Path(folder))


def show(made: Training, seconds: float, ranks: int) -> None:
    """Print what was measured without a fault."""
    print(f"start: {made.start_seconds:.1f} s, {made.start.store[''] / ranks:.1f} store operations per rank, ", end="")
    print(f"{made.start.store['attempt'] / ranks:.1f} more while it waits for others, ", end="")
    print(f"{made.start.size / ranks:,.0f} bytes per rank, {made.start.file_operations:,} file operations")
    print(f"training: {made.training.operations / seconds:,.0f} store operations/s, ", end="")
    print(f"{made.training.size / seconds / 1e3:,.0f} kB/s, {made.training.file_operations:,} file operations", end=", ")
    print(f"{made.memory / ranks / 2**20:.2f} MiB per rank")
    print(
        f"preemption: agreed after {made.preempted_seconds:.1f} s; to the end {made.end.operations / ranks:.2f} store ", end=""
    )
    print(f"operations per rank, {made.end.file_operations:,} file operations", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024, help="number of ranks")
    parser.add_argument("--nodes", type=int, default=128, help="number of nodes; must divide the ranks")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the training without a fault")
    parser.add_argument("--step-seconds", type=float, default=1.0, help="duration of a simulated step")
    parser.add_argument("--timeout", type=float, default=10.0, help="the watchdog's timeout")
    arguments = parser.parse_args()
    if arguments.ranks % arguments.nodes or arguments.ranks < 2 * arguments.nodes:
        parser.error(
            f"--ranks {arguments.ranks}: each of --nodes {arguments.nodes} must have the same number of ranks, 2 or more"
        )
    os.environ["PYTHONPATH"] = sys.path[0]  # by which the server of forks finds what it imports
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # otherwise a line for every address that has no name
    CONTEXT.set_forkserver_preload(PRELOAD)
    with simulation(**vars(arguments)) as simulated:
        show(simulated.train(), arguments.seconds, arguments.ranks)
        for fault in [fault for fault in FAULTS if arguments.nodes > 1 or fault.kind != "lost_node"]:
            made = simulated.fail(fault)
            after = f"{arguments.timeout:g} s + " if fault.kind == "hang" else ""
            print(f"{fault.name}: reported after {after}{made.reported_seconds:.1f} s, known everywhere after ", end="")
            print(f"{after}{made.known_seconds:.1f} s, {made.counts.file_operations} file operations", flush=True)


if __name__ == "__main__":
    main()
