"""What a launch on several machines prints while it waits, and a port that another program has."""

import signal
import socket
import subprocess
import threading
import time
from argparse import Namespace
from types import SimpleNamespace

import pytest
from launches import call_in_process, finish, start
from torch.distributed import TCPStore

from ddp_lab.launchers import start_ranks, waiting
from ddp_lab.launchers.waiting import announced, is_free_or_store
from ddp_lab.run.train import where_output_is


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(waiting, "FIRST", 0.5)
    monkeypatch.setattr(waiting, "AGAIN", 1.0)
    monkeypatch.setattr(waiting, "POLL", 0.1)


@pytest.mark.parametrize(
    ("nnodes", "text"),
    [
        ("2", "waiting for 1 more machine at a:29400"),
        ("2:4", "waiting for 1 more machine at a:29400"),
        ("4", "waiting until 4 machines have joined at a:29400"),
    ],
)
def test_launch_without_ranks_says_what_it_waits_for_and_again(
    nnodes, text, soon, capsys, monkeypatch
):
    monkeypatch.setattr("psutil.Process.children", lambda process: [])
    with announced(nnodes, "a:29400"):
        time.sleep(2.2)
    assert capsys.readouterr().err == f"{text}\n" * 2
    time.sleep(1.3)
    assert not capsys.readouterr().err


def test_launch_with_ranks_says_nothing(soon, capsys, monkeypatch):
    monkeypatch.setattr("psutil.Process.children", lambda process: [1])
    with announced("2", "a:29400"):
        time.sleep(1.0)
    assert not capsys.readouterr().err


def answer(server: socket.socket, text: bytes) -> None:
    while True:
        connection, _ = server.accept()
        connection.sendall(text)


def try_ports() -> None:
    """Try ports of no one, of a store, of a program that talks, and of one that is silent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    assert is_free_or_store("127.0.0.1", free)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert is_free_or_store("127.0.0.1", store.port)
    silent = socket.create_server(("127.0.0.1", 0))
    begin = time.monotonic()
    assert not is_free_or_store("127.0.0.1", silent.getsockname()[1])
    assert time.monotonic() - begin < 10
    talks = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=answer, args=(talks, b"SSH-2.0-OpenSSH"), daemon=True).start()
    assert not is_free_or_store("127.0.0.1", talks.getsockname()[1])


def test_port_of_another_program_is_told_from_that_of_a_store():
    done = call_in_process(try_ports)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("endpoint", "address", "port", "expected"),
    [
        ("a:123", None, None, ("a", 123)),
        ("a", None, None, ("a", 29400)),
        ("[::1]:7", None, None, ("::1", 7)),
        ("", "b", 8, ("b", 8)),
    ],
)
def test_machines_meet_at_the_address_of_the_options(endpoint, address, port, expected):
    options = Namespace(rdzv_endpoint=endpoint, master_addr=address, master_port=port)
    assert start_ranks.meeting_point(options) == expected


@pytest.mark.slow
def test_machine_that_waits_for_another_one_says_so_and_one_with_a_foreign_port_ends():
    line = "ddp-lab train --nproc 1 --nnodes 2 strategy=ddp --rdzv-endpoint"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, output = finish(start(line, f"127.0.0.1:{port}"), 120)
    expected = f"error: the ranks were not started: 127.0.0.1:{port}: the port is in use; choose "
    assert (code, output) == (2, f"{expected}another one, the same on every machine\n")

    process = start(line, f"127.0.0.1:{port}", stderr=subprocess.PIPE)
    assert process.stderr.readline() == f"waiting for 1 more machine at 127.0.0.1:{port}\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


@pytest.mark.parametrize(("ranks", "text"), [(1, "rank 2 trains"), (2, "ranks 2 to 3 train")])
def test_machine_without_rank_0_says_where_the_output_is(ranks, text, tmp_path):
    runtime = SimpleNamespace(rank=2, local_world_size=ranks, master=("first", 29500))
    line = where_output_is(runtime, tmp_path)
    expected = f"{text} here; the output is that of rank 0 on first, also in {tmp_path}/train.log"
    assert line == expected
