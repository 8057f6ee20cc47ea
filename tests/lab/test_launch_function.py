"""`launch` and the names of the library."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from launches import ROOT

from ddp_lab import Lab
from ddp_lab.config.errors import ConfigError
from ddp_lab.lab.launch import RankError, launch


def test_launch_returns_the_result_of_rank_0_and_restores_the_process():
    handler = signal.getsignal(signal.SIGINT)
    offset = 10

    def function(tensor):
        with Lab("scratch", device="cpu") as lab:
            return tensor + offset, lab.rank, lab.world_size

    total, rank, size = launch(function, torch.arange(3.0), nproc=2)
    assert (total.tolist(), rank, size) == ([10.0, 11.0, 12.0], 0, 2)
    assert signal.getsignal(signal.SIGINT) is handler
    assert "RANK" not in os.environ


def raises():
    if os.environ["RANK"] == "1":
        raise ValueError("no such thing")
    time.sleep(60)


def is_killed():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def exits_with_code_0():
    if os.environ["RANK"] == "1":
        os._exit(0)
    time.sleep(60)


def makes_a_mistake():
    Lab("dpp")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raises, r"rank 1 raised:\n\nTraceback .*, in raises\n.*\nValueError: no such thing"),
        (is_killed, "rank 1 was ended by SIGKILL"),
        (
            exits_with_code_0,
            r"rank 1 ended with exit code 0 in the function, for example by os\._exit\(0\)",
        ),
        (sys.exit, r"rank . raised:\n\nConfigError: launch: the function called sys\.exit\(\)"),
        (makes_a_mistake, "rank . raised:\n\nConfigError: strategy=dpp: there is no such option"),
        (
            lambda: launch(raises),
            "ConfigError: launch: this process is a rank already, started by torchrun or by launch",
        ),
        (lambda: lambda: 0, "cannot be returned"),
    ],
    ids=["exception", "kill", "code_0", "sys.exit", "mistake", "nested", "result"],
)
def test_error_of_a_rank_arrives_once_in_the_caller(function, text, capfd):
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        launch(function)
    assert re.search(text, str(error.value), re.DOTALL)
    assert time.monotonic() - start < 30
    assert capfd.readouterr().err == ""


def test_launch_refuses_what_cannot_be_forked(monkeypatch):
    with pytest.raises(ConfigError, match="launch: nproc=0: must be an integer of at least 1"):
        launch(raises, nproc=0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        ConfigError, match="launch: this process has used CUDA, which a fork cannot use again"
    ):
        launch(raises)


NAMES = """
import sys, time
import ddp_lab
assert "torch" not in sys.modules
start = time.process_time()
import torch
then = time.process_time()
from ddp_lab import Lab, launch, tasks
share = (time.process_time() - then) / (then - start)
import ddp_lab.launchers.command_line
assert all(map(callable, (Lab, launch, ddp_lab.launch, tasks.Segmentation)))
print(share)
"""


@pytest.mark.slow
def test_import_of_the_names_is_lazy_and_takes_less_than_half_of_torchs():
    ended = subprocess.run(
        [sys.executable, "-c", NAMES],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    assert float(ended.stdout) < 0.5
    assert (ROOT / "ddp_lab/py.typed").exists()
