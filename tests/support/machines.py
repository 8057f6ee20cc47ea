"""Two machines on this one: namespaces with a virtual cable. Each has its own host name and /dev/shm; they share the disks.

They need root privileges and iproute2.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from launches import start

ADDRESSES = ("10.77.0.1", "10.77.0.2")
SET_UP = 'hostname "$1" && mount -t tmpfs none /dev/shm && mount --bind "$2" /etc/hosts && echo ready && exec sleep infinity'


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
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
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
        """Start a command on this machine by new interpreters, as `launches.start` does."""
        enter = f"nsenter --target={self.keeper.pid} --net --uts --mount"
        return start(f"{enter} {Path(sys.executable).parent}/{line}", *more)

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
