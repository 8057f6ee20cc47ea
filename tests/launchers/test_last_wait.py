"""A signal to a launcher whose ranks have ended, and that waits for another machine in vain."""

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from launches import SMALL, finish, only_run, start, wait_for

from ddp_lab.launchers import last_wait
from ddp_lab.launchers.last_wait import ended_by_signals

OVERRIDES = [*SMALL, "strategy=scratch", "device=cpu", "epochs=100000"]
SOON = 60.0  # seconds, on a busy machine; torch waits for 300


@pytest.fixture
def connection():
    """Two sockets of this process that are connected: of a program, and of a client."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        accepted, _ = server.accept()
        with accepted:
            yield accepted, client


def wait_in_vain(
    connection: tuple[socket.socket, socket.socket], *numbers: int, seconds: float = 3.0
) -> bytes:
    """Send signals to this process, and read from a program that first says nothing."""
    program, client = connection
    port = program.getsockname()[1]
    late = threading.Timer(seconds, program.sendall, [b"late"])
    with ended_by_signals([signal.SIGUSR1], port):
        for number in numbers:
            os.kill(os.getpid(), number)
        late.start()
        received = client.recv(4)
    late.cancel()
    late.join()
    return received


@pytest.fixture
def handled(monkeypatch):
    """Signals with a handler, and a launcher without ranks that does not wait for long."""
    monkeypatch.setattr(last_wait, "PATIENCE", 0.5)
    monkeypatch.setattr(last_wait, "discard_stderr", lambda: None)
    monkeypatch.setattr("psutil.Process.children", lambda process: [])
    numbers = signal.SIGUSR1, signal.SIGUSR2
    before = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signal_ends_the_wait_of_a_launcher_without_ranks(connection, handled):
    begin = time.monotonic()
    assert wait_in_vain(connection, signal.SIGUSR1, seconds=SOON) == b""
    assert time.monotonic() - begin >= last_wait.PATIENCE


def test_wait_goes_on_without_a_signal_and_after_another_one(connection, handled):
    assert wait_in_vain(connection, signal.SIGUSR2) == b"late"
    assert wait_in_vain(connection) == b"late"


def test_wait_goes_on_while_there_are_ranks(connection, handled, monkeypatch):
    monkeypatch.setattr("psutil.Process.children", lambda process: [1])
    assert wait_in_vain(connection, signal.SIGUSR1) == b"late"


def test_connections_to_other_ports_stay(connection, handled):
    program, client = connection
    with socket.create_server(("127.0.0.1", 0)) as other:
        last_wait.close_connections(other.getsockname()[1])
    program.sendall(b"here")
    assert client.recv(4) == b"here"


def start_machines(runs: Path):
    """Start two launches as two machines; the first one has the store."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = f"ddp-lab train --nproc 1 --nnodes 2 --rdzv-endpoint 127.0.0.1:{port} --rdzv-id waits"
    return [
        start(f"{line} --rdzv-conf=is_host={is_host}", *OVERRIDES, f"runs_dir={runs}")
        for is_host in (1, 0)
    ]


@pytest.mark.slow
def test_machine_that_gets_ctrl_c_after_the_ranks_have_ended_ends_as_the_other(tmp_path):
    """The other machine has left by then, and has not told this one."""
    machines = start_machines(tmp_path)

    def trains() -> bool:
        return any("epoch 1:" in path.read_text() for path in tmp_path.glob("*/train.log"))

    wait_for("first epoch", trains, 100)
    machines[1].send_signal(signal.SIGINT)
    assert finish(machines[1], SOON)[0] == 130
    assert machines[0].poll() is None
    machines[0].send_signal(signal.SIGINT)
    code, output = finish(machines[0], SOON)
    assert code == 130, output
    assert "Traceback" not in output, output
    status = json.loads((only_run(tmp_path) / "status.json").read_text())["status"]
    assert status == "interrupted"
