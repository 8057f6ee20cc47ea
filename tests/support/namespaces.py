"""Two network namespaces with a virtual cable between them, as two machines. They need root privileges and iproute2."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.77.0.1", "10.77.0.2")


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
