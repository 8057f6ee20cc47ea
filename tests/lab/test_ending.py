"""Whatever ends a launch or a script with worker processes: it ends, and no process is left."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import ending
import pytest
from launches import ROOT, SUPPORT, launch

TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc_per_node=2"]


def start(command: list[str]) -> tuple[subprocess.Popen, str]:
    """Start the script in a session of its own, as a cold interpreter, whose end is the subject.

    Return it and its mark.
    """
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    path = os.pathsep.join([str(ROOT), str(SUPPORT)])
    environment = os.environ | {
        ending.MARK: mark,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    process = subprocess.Popen(
        [*command[:-2], str(SUPPORT / "ending.py"), *command[-2:]]
        if command[-2] == "script"
        else command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return process, mark


def finish(process: subprocess.Popen, mark: str, timeout: float = 120) -> str:
    """Return the output of a script, which must end in time with all its processes."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        found = ending.others(mark)
        end(mark)
        output, _ = process.communicate()
        raise AssertionError(f"not done within {timeout} s; left: {found}\n{output}") from None
    left = ending.left_over(mark)
    end(mark)
    assert not left, f"{left}\n{output}"
    return output


def end(mark: str) -> None:
    for each in ending.others(mark):
        os.kill(int(each.split()[0]), signal.SIGKILL)


def test_launch_ends_with_worker_processes():
    ways = {
        "fit": "fit",
        "break": "break",
        "stuck": "stuck",
        "open": "open",
        "raise": "ValueError: .* cause",
        "kill": "rank 1 .* SIGKILL",
    }
    process, mark = start([sys.executable, str(SUPPORT / "ending.py"), "launch", *ways])
    output = finish(process, mark)
    for how, outcome in ways.items():
        assert re.search(rf"^{how}: {outcome}; left: \[\]$", output, re.MULTILINE), output


@pytest.mark.parametrize(
    "send",
    [
        pytest.param(os.kill, id="parent"),
        pytest.param(os.killpg, id="group", marks=pytest.mark.slow),
    ],
)
def test_interrupted_launch_ends_with_all_processes(send):
    """A notebook's kernel gets the signal of its stop button alone, or with its process group."""
    process, mark = start([sys.executable, str(SUPPORT / "ending.py"), "launch", "wait"])
    for _ in range(2):
        assert process.stdout.readline() == "waiting\n"
    send(process.pid, signal.SIGINT)
    output = finish(process, mark, timeout=10)
    assert "KeyboardInterrupt" in output
    assert process.returncode != 0


def test_killed_launch_leaves_no_process():
    process, mark = start([sys.executable, str(SUPPORT / "ending.py"), "launch", "wait"])
    for _ in range(2):
        assert process.stdout.readline() == "waiting\n"
    process.kill()
    finish(process, mark, timeout=10)


PYTHON = [sys.executable]


@pytest.mark.parametrize(
    ("command", "how"),
    [
        pytest.param(PYTHON, "stuck", id="python-stuck"),
        pytest.param(TORCHRUN, "raise", id="torchrun-raise"),
        pytest.param(PYTHON, "raise", id="python-raise", marks=pytest.mark.slow),
        pytest.param(TORCHRUN, "stuck", id="torchrun-stuck", marks=pytest.mark.slow),
    ],
)
def test_script_ends_with_worker_processes(command, how):
    process, mark = start([*command, "script", how])
    output = finish(process, mark)
    assert (process.returncode == 0) == (how == "stuck"), output
    assert output.count("ValueError: this rank has the cause") == (how == "raise"), output
    assert "Connection" not in output


def test_error_that_all_ranks_of_a_script_raise_is_printed_by_one():
    line = "torchrun --standalone --nproc_per_node=2"
    code, output = launch(line, str(SUPPORT / "ending.py"), "script", "label")
    assert code != 0
    assert output.count("SampleError: the targets contain the label 7, but") == 1, output
