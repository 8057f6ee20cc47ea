"""The hosts of a launch over ssh before their ranks are started: what is asked of all of them."""

import os
import secrets
import signal
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.launchers.host_checks import (
    Clock,
    connection_faults,
    explain_loss,
    explain_silence,
    port_fault,
    raise_faults,
)
from ddp_lab.launchers.host_options import HostLaunch
from ddp_lab.launchers.short_run import search_path
from ddp_lab.launchers.ssh import Answer, Connection, address_of, heartbeat
from ddp_lab.launchers.start_ranks import C10D_PORT
from ddp_lab.launchers.waiting import AGAIN, FIRST

# Environment variables, by their beginnings, that the hosts get from this machine.
PASSED = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "OMP_", "MKL_")
HELLO = 20.0  # seconds for ssh and the start of Python
CHECKED = 90.0  # seconds for the checks, with the import of torch where GPUs are counted
TOLD = 15.0  # seconds for any other answer
POLL = 0.5  # seconds between looks at the clock


def passed_environment() -> dict[str, str]:
    """Return the environment variables that the hosts get from this machine."""
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
    search = search_path()
    return passed | ({"PYTHONPATH": search} if search else {})


class HostGroup:
    """The connections to all hosts before their ranks are started.

    Args:
        launch: What is to be launched.
        connections: By name, in the order of the hosts.
        answers: What the hosts say.
    """

    def __init__(
        self,
        launch: HostLaunch,
        connections: dict[str, Connection],
        answers: "SimpleQueue[Answer]",
    ):
        self.launch = launch
        self.connections = connections
        self.answers = answers

    def gather(self, kind: str, names: Sequence[str], limit: float) -> dict[str, Answer]:
        """Return one answer of each host, in their order. It says for which hosts it waits.

        Args:
            kind: Of the answers.
            names: Of the hosts.
            limit: Seconds for all of them.

        Raises:
            ConfigError: A host did not answer in time, or its connection has ended.
        """
        begin = time.monotonic()
        due = FIRST
        answers = dict[str, Answer]()
        place = self.launch.place
        while waiting := [name for name in names if name not in answers]:
            waited = time.monotonic() - begin
            if waited > limit:
                break
            if waited > due:
                print(f"waiting for {', '.join(waiting)} to answer", file=sys.stderr, flush=True)
                due += AGAIN
            try:
                answer = self.answers.get(timeout=POLL)
            except Empty:
                continue
            if answer.kind in (kind, "lost"):
                answers[answer.host] = answer
        faults = list[str]()
        for name in names:
            if name not in answers:
                faults.append(explain_silence(name, limit, place))
            elif answers[name].kind == "lost":
                facts = answers[name].facts
                faults.append(explain_loss(name, facts["code"], facts["text"], place))
        raise_faults(faults)
        return {name: answers[name] for name in names}

    def check(self, count_gpus: bool) -> dict[str, dict[str, Any]]:
        """Return what there is on each host for the launch.

        Args:
            count_gpus: Whether to count the GPUs, too.

        Raises:
            ConfigError: A host cannot be reached.
        """
        names = list(self.connections)
        self.gather("hello", names, HELLO)
        for connection in self.connections.values():
            connection.ask(
                "check",
                directory=self.launch.place.directory,
                environment=passed_environment(),
                count_gpus=count_gpus,
            )
        answers = self.gather("checked", names, CHECKED)
        return {name: answer.facts for name, answer in answers.items()}

    def compare_clocks(self) -> dict[str, Clock]:
        """Return by how much the clocks of the hosts are ahead of this machine's."""
        asked = dict[str, float]()
        for name, connection in self.connections.items():
            asked[name] = time.time()
            connection.ask("time")
        answers = self.gather("time", list(self.connections), TOLD)
        clocks = dict[str, Clock]()
        for name, answer in answers.items():
            half = (answer.at - asked[name]) / 2
            clocks[name] = Clock(answer.facts["now"] - asked[name] - half, abs(half))
        return clocks

    def arrange(self, ranks: Mapping[str, int]) -> tuple[dict[str, list[str]], str]:
        """Return the arguments of `ddp-lab train` for each host, and which host has rank 0.

        Args:
            ranks: Number of ranks by host.

        Raises:
            ConfigError: The place where the hosts are to meet cannot be used.
        """
        launch = self.launch
        config_dir = ["--config-dir", launch.config_dir] if launch.config_dir else []
        rest = [*config_dir, *launch.others]
        names = list(self.connections)
        conf = [f"--rdzv-conf={launch.rdzv_conf}"] if launch.rdzv_conf else []
        if len(names) == 1:
            return {names[0]: ["--nproc", str(ranks[names[0]]), *conf, *rest]}, names[0]

        addresses = {name: address_of(launch.place.ssh_words, name) for name in names}
        # torch numbers the ranks in the order of the texts of the addresses
        first = min(names, key=addresses.__getitem__)
        host, port = self.meet(first, addresses)
        address = f"{addresses[host]}:{port}"
        listed = ", ".join(f"{number} on {name}" for name, number in ranks.items())
        total = count(sum(ranks.values()), "rank")
        print(f"{total}: {listed}; they meet at {address}", file=sys.stderr, flush=True)
        run = secrets.token_hex(4)
        common = ["--nnodes", str(len(names)), "--rdzv-endpoint", address, "--rdzv-id", run]
        return {
            name: [
                *("--nproc", str(ranks[name]), *common, "--local-addr", addresses[name]),
                f"--rdzv-conf={join_conf(launch.rdzv_conf, name == host)}",
                *rest,
            ]
            for name in names
        }, first

    def meet(self, first: str, addresses: Mapping[str, str]) -> tuple[str, int]:
        """Return the host and the port at which the hosts meet. All of them have reached it.

        Args:
            first: The host with rank 0.
            addresses: Of the hosts.

        Raises:
            ConfigError: --rdzv-endpoint names no host, the port is taken, or a host cannot reach
                it.
        """
        host = first
        port = 0
        if self.launch.endpoint:
            name, _, number = self.launch.endpoint.partition(":")
            matching = [each for each, address in addresses.items() if name in (each, address)]
            if not matching or (number and not number.isdecimal()):
                allowed = ", ".join(f"{address}:PORT" for address in addresses.values())
                raise ConfigError(
                    f"--rdzv-endpoint {self.launch.endpoint}: must be a port of one of the hosts; "
                    f"use one of {allowed}"
                )
            host = matching[0]
            port = int(number or C10D_PORT)

        self.connections[host].ask("listen", port=port)
        facts = self.gather("listening", [host], TOLD)[host].facts
        if facts["error"]:
            raise ConfigError(port_fault(host, facts["port"], facts["error"]))
        others = [name for name in addresses if name != host]
        for name in others:
            self.connections[name].ask("connect", host=addresses[host], port=facts["port"])
        reports = self.gather("connected", others, TOLD)
        address = f"{addresses[host]}:{facts['port']}"
        raise_faults(
            connection_faults({name: each.facts for name, each in reports.items()}, address)
        )
        return host, facts["port"]


def join_conf(conf: str, is_host: bool) -> str:
    """Return --rdzv-conf with the word that decides which host keeps the store."""
    return ",".join([*filter(None, [conf]), f"is_host={int(is_host)}"])


@contextmanager
def connected(launch: HostLaunch) -> Generator[HostGroup]:
    """Connect to all hosts at once. At the end whatever still runs there is ended.

    Args:
        launch: What is to be launched.

    Raises:
        ConfigError: The command of --ssh cannot be started.
    """
    answers = SimpleQueue[Answer]()
    connections = dict[str, Connection]()
    place = launch.place
    try:
        for name, _ in launch.hosts:
            try:
                connections[name] = Connection(place.ssh_words, name, place.python, answers)
            except OSError as error:
                raise ConfigError(
                    f"--ssh {place.ssh}: cannot be started ({error.strerror}). Install an "
                    "ssh client, or use --ssh COMMAND"
                ) from None
        with heartbeat(connections.values()):
            yield HostGroup(launch, connections, answers)
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it takes LEAVE seconds at most
        for connection in connections.values():
            connection.close()
        for connection in connections.values():
            connection.end()
        signal.signal(signal.SIGINT, before)
