"""What a launch on several machines prints while it waits for the others.

torch's launcher waits in silence, for minutes: also where another program has the port at which the
machines are to meet.
"""

import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import psutil

from ddp_lab.world.process import print_line

FIRST = 5.0  # seconds after which the first line is printed
AGAIN = 30.0  # seconds between lines after it
POLL = 1.0  # seconds between looks at the ranks
ANSWER = 2.0  # seconds within which a store must answer, which takes it milliseconds
LIMIT = 4.0  # seconds after which a process that asks a store is killed


@contextmanager
def announced(nnodes: str, address: str) -> Generator[None]:
    """Print what is waited for while the body has started no ranks, or has lost all of them.

    Args:
        nnodes: Number of machines, N or MIN:MAX.
        address: Where they meet, HOST:PORT.
    """
    least = int(nnodes.partition(":")[0])
    if least == 2:
        text = f"waiting for 1 more machine at {address}"
    else:
        text = f"waiting until {least} machines have joined at {address}"
    ended = threading.Event()
    threading.Thread(target=announce, args=(text, ended), name="waiting", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def announce(text: str, ended: threading.Event) -> None:
    """Print a text whenever this process has had no children for FIRST seconds, until `ended`."""
    process = psutil.Process()
    waited = 0.0
    due = FIRST
    while not ended.wait(POLL):
        if process.children():
            waited = 0.0
            due = FIRST
            continue
        waited += POLL
        if waited >= due:
            print_line(text, sys.stderr)
            due += AGAIN


def is_free(host: str, port: int) -> bool:
    """Return whether nothing answers at an address yet.

    Args:
        host: Name or address.
        port: Of the machines' rendezvous.
    """
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError:
        return True
    return False


def is_free_or_store(host: str, port: int) -> bool:
    """Return whether nothing answers at an address yet, or a store of torch's launcher.

    Args:
        host: Name or address.
        port: Of the machines' rendezvous.
    """
    if is_free(host, port):
        return True
    # In a process of its own: with a program that never answers, torch waits without end.
    probe = multiprocessing.get_context("fork").Process(target=connect, args=(host, port))
    probe.start()
    probe.join(LIMIT)
    if probe.is_alive():
        probe.kill()
        probe.join()
    return probe.exitcode == 0


def connect(host: str, port: int) -> None:
    """Connect to a store, and end this process with exit code 0 if there is one."""
    from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)  # torch's log
    try:
        TCPStore(host, port, timeout=timedelta(seconds=ANSWER), wait_for_workers=False)
    except (DistError, RuntimeError):
        os._exit(1)
    os._exit(0)
