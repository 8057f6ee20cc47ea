"""Whatever ends a launch or a script with worker processes: it ends, and no process is left."""

import os
import re
import signal
import subprocess

import ending
import launches
import pytest
from launches import SUPPORT
from warm import FINALIZE

TORCHRUN = "torchrun --standalone --nproc_per_node=2"


def start(program: str, *arguments: str) -> tuple[subprocess.Popen, str]:
    """Start ending.py in a process that ends as an interpreter does; return it and its pipe."""
    process = launches.start(f"env {FINALIZE}=1 {program}", str(SUPPORT / "ending.py"), *arguments)
    return process, ending.pipe_of(process.pid)


def finish(process: subprocess.Popen, pipe: str, timeout: float = 120) -> str:
    """Return the output of a script, which must end in time with all processes that write it."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        left = ending.others(pipe)
        for each in left:
            os.kill(int(each.split()[0]), signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"not done within {timeout} s; left: {left}\n{output}") from None
    return output


def start_waiting() -> tuple[subprocess.Popen, str, int]:
    """Start a launch whose ranks wait; return its process and pipe, and the parent of the ranks."""
    process, pipe = start("python", "launch", "wait")
    parents = {process.stdout.readline().removeprefix("waiting for ") for _ in range(2)}
    (parent,) = parents
    return process, pipe, int(parent)


@pytest.mark.slow
def test_launch_ends_with_worker_processes():
    ways = {
        "fit": "fit",
        "break": "break",
        "stuck": "stuck",
        "open": "open",
        "raise": "ValueError: .* cause",
        "kill": "rank 1 .* SIGKILL",
    }
    output = finish(*start("python", "launch", *ways))
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
    process, pipe, parent = start_waiting()
    send(parent, signal.SIGINT)
    output = finish(process, pipe, timeout=10)
    assert "KeyboardInterrupt" in output
    assert process.returncode != 0


def test_killed_launch_leaves_no_process():
    process, pipe, parent = start_waiting()
    os.kill(parent, signal.SIGKILL)
    finish(process, pipe, timeout=10)


@pytest.mark.parametrize(
    ("command", "how"),
    [
        pytest.param("python", "stuck", id="python-stuck"),
        pytest.param(TORCHRUN, "raise", id="torchrun-raise", marks=pytest.mark.slow),
        pytest.param("python", "raise", id="python-raise", marks=pytest.mark.slow),
        pytest.param(TORCHRUN, "stuck", id="torchrun-stuck", marks=pytest.mark.slow),
    ],
)
def test_script_ends_with_worker_processes(command, how):
    process, pipe = start(command, "script", how)
    output = finish(process, pipe)
    assert (process.returncode == 0) == (how == "stuck"), output
    assert output.count("ValueError: this rank has the cause") == (how == "raise"), output
    assert "Connection" not in output


def test_error_that_all_ranks_of_a_script_raise_is_printed_by_one():
    code, output = launches.launch(TORCHRUN, str(SUPPORT / "ending.py"), "script", "label")
    assert code != 0
    assert output.count("SampleError: the targets contain the label 7, but") == 1, output
