"""Signals to a launcher whose ranks have ended, while it waits for those of the other machines.

torch (2.15) waits for them for up to 300 s in C++, where Python calls no handler of a signal. A
launcher that gets a signal before its ranks have ended leaves, and does not tell the others. So if
a signal reaches one machine a little later than the others, its launcher would wait in vain, and
neither Ctrl-C nor SIGTERM would end it.
"""

import os
import signal
import socket
import threading
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress

import psutil

POLL = 0.2  # seconds between looks at the ranks
PATIENCE = 2.0  # seconds in which a launcher without ranks acts on a signal, unless it waits


@contextmanager
def ended_by_signals(signals: Collection[signal.Signals], port: int) -> Generator[None]:
    """Let a signal end the wait of torch's launcher in the body, which then calls its handler.

    Call it in the main thread.

    Args:
        signals: For which torch's launcher sets handlers.
        port: At which the launchers have met.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # as Python asks for
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    ended = threading.Event()
    thread = threading.Thread(
        target=end_wait, args=(reader, signals, port, ended), name="last wait", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(writer)  # which the thread reads as the end
        thread.join()
        os.close(reader)


def end_wait(
    reader: int, signals: Collection[signal.Signals], port: int, ended: threading.Event
) -> None:
    """After a signal, and once this process has no ranks, close its connections to a port.

    Args:
        reader: File descriptor with the number of each signal as a byte.
        signals: Those that count.
        port: As for `ended_by_signals`.
        ended: Whether the launcher has ended.
    """
    while (number := os.read(reader, 1)) and number[0] not in signals:
        pass
    process = psutil.Process()
    waited = 0.0
    while number and waited < PATIENCE and not ended.wait(POLL):
        waited += POLL
        if process.children():
            waited = 0.0
    if waited >= PATIENCE:
        discard_stderr()
        close_connections(port)


def discard_stderr() -> None:
    """Let nothing reach stderr any more, also of C++.

    The signal ends this process, and torch would log each lost connection with a stack.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def close_connections(port: int) -> None:
    """Close the connections of this process to a port, of whatever address.

    Whoever waits for an answer there gets an error.
    """
    for name in os.listdir("/dev/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.getpeername()[1:2] == (port,):
                connection.shutdown(socket.SHUT_RDWR)
