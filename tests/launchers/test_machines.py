"""A run over two machines with their own host names, /dev/shm and network, but one run directory.

The machines are namespaces of this one with a virtual cable. They need root privileges and
iproute2.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from launches import SMALL, finish, launch, newest, read_metrics, start, wait_for

from ddp_lab.resilience.run_directory import read_json

pytestmark = pytest.mark.slow

EPOCHS = 4
OVERRIDES = [*SMALL, "strategy=scratch", f"epochs={EPOCHS}", "checkpoint.every_steps=3", "name=run"]
REPORTED = 10.0  # seconds within which a lost node is reported
BUSY = 5.0  # additional seconds on a busy machine
ADDRESSES = ("10.77.0.1", "10.77.0.2")
SET_UP = (
    'hostname "$1" && mount -t tmpfs none /dev/shm && mount --bind "$2" /etc/hosts && echo ready '
    "&& exec sleep infinity"
)


def ip(*words: str) -> None:
    """Run a command of iproute2.

    Raises:
        CalledProcessError: It has failed, for example because this user may not create namespaces.
        FileNotFoundError: iproute2 is not installed.
    """
    subprocess.run(["ip", *words], check=True)


@contextmanager
def cable(names: tuple[str, str]) -> Iterator[None]:
    """Connect two new network namespaces. They are removed afterwards, and the cable with them.

    Args:
        names: of the namespaces, and of the cable's end in each; at most 15 characters.

    Raises:
        CalledProcessError, FileNotFoundError: As `ip`.
    """
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip(
            "link",
            "add",
            names[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            names[1],
            "netns",
            names[1],
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            for device in ("lo", name):
                ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


class Machine:
    """A network namespace and a process that keeps the others.

    Args:
        name: of the host, the namespace and its end of the cable.
        hosts: a file for /etc/hosts.
    """

    def __init__(self, name: str, hosts: Path):
        self.name = name
        namespaces = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount"]
        self.keeper = subprocess.Popen(
            [*namespaces, "sh", "-c", SET_UP, "sh", name, str(hosts)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.ready = self.keeper.stdout.readline()

    def start(self, line: str, *more: str) -> subprocess.Popen:
        """Start a module of Python on this machine as `launches.start` does."""
        return start(f"python tests/support/enter.py {self.keeper.pid} {line}", *more)

    def connect(self, state: str) -> None:
        """Set the cable "up" or "down"."""
        ip("-n", self.name, "link", "set", "dev", self.name, state)

    def close(self) -> None:
        self.keeper.kill()
        self.keeper.communicate()


@contextmanager
def two_machines(folder: Path) -> Iterator[list[Machine]]:
    """Return two machines that know each other by name. Skip the test where they cannot be made."""
    names = f"node0-{os.getpid()}", f"node1-{os.getpid()}"
    hosts = folder / "hosts"
    hosts.write_text(
        "127.0.0.1 localhost\n"
        + "".join(f"{a} {n}\n" for a, n in zip(ADDRESSES, names, strict=True))
    )
    with ExitStack() as stack:
        try:
            stack.enter_context(cable(names))
            machines = [Machine(name, hosts) for name in names]
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs root privileges, iproute2 and unshare: {error}")
        for machine in machines:
            stack.callback(machine.close)
        if any(machine.ready != "ready\n" for machine in machines):
            pytest.skip(
                f"needs the right to make namespaces: {[machine.ready for machine in machines]}"
            )
        yield machines


def start_node(machines: list[Machine], node: int, runs: Path):
    """Start torchrun on a machine.

    Node 1 sleeps before step 8 and node 0 before step 14: there the test interferes.
    """
    options = "--nnodes=2 --nproc_per_node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=run"
    endpoint = f"--rdzv-endpoint={machines[0].name}:29500 --rdzv-conf=is_host={1 - node}"
    fault = f"inject=slow@rank={node},step={14 - 6 * node}"
    line = f"ddp_lab train {options} {endpoint}"
    return machines[node].start(line, *OVERRIDES, f"runs_dir={runs}", fault)


def await_fault(run: Path, fault: str) -> None:
    wait_for(
        fault,
        lambda: (run / ".injected").exists() and fault in (run / ".injected").read_text(),
        120,
    )


def read(path: Path) -> dict:
    return read_json(path) or {}


def test_run_survives_a_lost_machine_and_resumes_after_a_preemption(tmp_path):
    runs = tmp_path / "runs"
    run = tmp_path / "runs" / "run"
    with two_machines(tmp_path) as machines:
        agents = [start_node(machines, node, runs) for node in (0, 1)]
        await_fault(run, "step=8")
        table = read(run / "status.json")["heartbeats"]
        assert os.readlink(table).startswith("/dev/shm/ddp_lab-")
        wait_for(
            "the table without a name, which would remain of a lost node",
            lambda: "(deleted)" in os.readlink(table),
            10,
        )

        machines[1].connect("down")  # first, so that nobody is informed that its processes end
        agents[1].kill()
        lost = time.time()
        failure = wait_for("failure.json", lambda: read(run / "failure.json"), 60)
        assert (failure["kind"], failure["rank"], failure["host"]) == (
            "lost_node",
            1,
            machines[1].name,
        )
        assert failure["time"] - lost < REPORTED + BUSY
        machines[1].connect("up")
        agents[1] = start_node(machines, 1, runs)

        await_fault(run, "step=14")
        assert (
            "started again after error: rank 1 on " + machines[1].name
            in (run / "train.log").read_text()
        )
        for agent in agents:
            os.kill(agent.pid, signal.SIGTERM)
        outputs = [finish(agent, timeout=60) for agent in agents]
        assert read(run / "status.json")["status"] == "preempted", outputs

        outputs = [
            finish(agent, timeout=120)
            for agent in [start_node(machines, node, runs) for node in (0, 1)]
        ]
        assert [code for code, _ in outputs] == [0, 0], outputs
    assert read(run / "status.json")["status"] == "finished"
    assert [line["epoch"] for line in read_metrics(run)] == list(range(1, EPOCHS + 1))
    code, output = launch(
        "torchrun --standalone --nproc_per_node=2 train.py",
        *OVERRIDES,
        f"runs_dir={tmp_path / 'one'}",
    )
    assert code == 0, output
    expected = newest(tmp_path / "one" / "run")["model"]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in newest(run)["model"].items())
