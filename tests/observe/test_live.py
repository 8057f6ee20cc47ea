"""TensorBoard during a run that is still training."""

import contextlib
import json
import os
import signal
import socket
import time
import urllib.request
from pathlib import Path

from launches import ROOT, SMALL, start


def served(url: str, holds, deadline: float) -> object:
    """Return the server's JSON answer as soon as `holds` returns true for it."""
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=5) as answer:
            if holds(found := json.load(answer)):
                return found
        time.sleep(0.5)
    raise AssertionError(f"{url} never gave the expected answer")


def test_tensorboard_shows_a_run_while_it_trains(tmp_path):
    """TensorBoard is started by the Makefile's command, with another port and directory."""
    (line,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if "/tensorboard --logdir runs" in line)
    command = line.split("/")[-1].replace("--logdir runs", f"--logdir {tmp_path}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = start("python train.py", *SMALL, "epochs=100000", "checkpoint.every_epochs=1000", f"runs_dir={tmp_path}", "name=live")
    board = start(f"{command} --port {port}")
    try:
        url = f"http://127.0.0.1:{port}/data/plugin/scalars/scalars?run=live&tag=accuracy/test"
        first = served(url, lambda points: len(points) > 1, time.monotonic() + 100)
        later = served(url, lambda points: len(points) > len(first), time.monotonic() + 60)
        assert run.poll() is None, "the run has ended"
        assert [step for _, step, _ in later][:3] == [1, 2, 3]
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"]
        assert f"0100007F:{port:04X}" in listening, "not reachable on localhost"
        assert f"00000000:{port:04X}" not in listening, "reachable from other hosts"
    finally:
        for process in (run, board):
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
