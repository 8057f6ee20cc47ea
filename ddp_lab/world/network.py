"""Settings of downloads."""

import socket
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def default_timeout(seconds: float) -> Generator[None]:
    """Set the default timeout, in seconds, of sockets that are created in the body."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
