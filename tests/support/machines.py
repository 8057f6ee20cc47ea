"""Two machines on this one: namespaces with a cable. Each has its own host name and /dev/shm; they share the disks."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import warm
from launches import start
from namespaces import ADDRESSES, cable, ip

SET_UP = 'hostname "$1" && mount -t tmpfs none /dev/shm && mount --bind "$2" /etc/hosts && echo ready && exec sleep infinity'


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
        """Start a command on this machine, as `launches.start` does. It is forked."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(warm.MACHINE, str(self.keeper.pid))
            return start(line, *more)

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
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for a, n in zip(ADDRESSES, names, strict=True)))
    with ExitStack() as stack:
        try:
            stack.enter_context(cable(names))
            machines = [Machine(name, hosts) for name in names]
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs root privileges, iproute2 and unshare: {error}")
        for machine in machines:
            stack.callback(machine.close)
        if any(machine.ready != "ready\n" for machine in machines):
            pytest.skip(f"needs the right to make namespaces: {[machine.ready for machine in machines]}")
        yield machines
