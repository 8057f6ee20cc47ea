"""Helpers that start train.py: in a subprocess, or in a world of the tests' ranks."""

import contextlib
import io
import json
import os
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from warm import HAS_GPUS, programs

from ddp_lab.observe.metrics_file import read_epochs, read_rows
from ddp_lab.resilience.heartbeats import read_row

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
SMALL = [
    "data=synthetic",
    "data.dataset.train_size=100",
    "data.dataset.test_size=50",
    "model=simple_cnn",
    "batch_size=24",
    "optimizer.lr=0.01",
]
# The same with a model of `own_models`, which `model._target_` names.
OWN = [
    *(override for override in SMALL if not override.startswith("model=")),
    "data.dataset.channels=1",
    "model=own",
]
# A model with BatchNorm; ResNet-18's ten million parameters would dominate the time of a short
# launch.
NARROW = [
    "model=lenet",
    "model._target_=small_networks.narrow_resnet",
    "data.dataset.image_size=16",
]


def start(
    line: str,
    *more: str,
    gpus: bool = False,
    cold: bool = False,
    stderr: int = subprocess.STDOUT,
    cwd: Path = ROOT,
) -> subprocess.Popen:
    """Start a command in the repository with this Python interpreter.

    It is forked from the server of warm.py if that runs.

    Args:
        line: The command, split at spaces.
        more: Further arguments.
        gpus: Whether GPUs are visible. Implies `cold` where there are any.
        cold: Start new interpreters, as from a shell.
        stderr, cwd: As in subprocess.Popen.
    """
    is_new = cold or (gpus and HAS_GPUS)
    folder = Path(sys.executable).parent if is_new else programs()
    hidden = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    search = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | hidden | {"OMP_NUM_THREADS": "1", "PATH": path, "PYTHONPATH": search}
    command = [*line.split(), *more]
    out = subprocess.PIPE
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=out,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, timeout: float = 300) -> tuple[int, str]:
    """Wait for a launch and return its exit code and output.

    After `timeout` seconds kill it with all its ranks and fail.
    """
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        raise AssertionError(f"not done within {timeout} s:\n{output}") from None
    return process.returncode, output


def launch(
    line: str, *more: str, gpus: bool = False, cold: bool = False, cwd: Path = ROOT
) -> tuple[int, str]:
    """Run a command as `start` does and return its exit code and output."""
    return finish(start(line, *more, gpus=gpus, cold=cold, cwd=cwd))


def call_in_process(
    function: Callable[[], None], timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Call a function of a test file in a process of its own, and return how that ended.

    The function may fork ranks, unlike the process of pytest, in which a test may have started
    threads of autograd. The process is forked from the server of warm.py if that runs.
    """
    search = [str(ROOT), str(SUPPORT), str(Path(function.__code__.co_filename).parent)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(search),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    module = Path(function.__code__.co_filename).stem
    command = [programs() / "python", SUPPORT / "call.py", module, function.__name__]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def launch_on_terminal(line: str, *more: str) -> str:
    """Run a command on a terminal of 100 columns, and return what it writes there."""
    command = f"stty rows 30 columns 100; {line} {shlex.join(more)}"
    code, output = launch("script --quiet --return --command", command, "/dev/null")
    assert code == 0, output
    return output


def wait_for(
    event: str, condition: Callable[[], Any], timeout: float = 300, more: Callable[[], str] = str
) -> Any:
    """Wait until `condition` returns a true value, and return that value.

    Args:
        event: What is waited for, in the message.
        condition: Called every 0.3 s; it may start a process.
        timeout: Seconds to wait.
        more: Returns details for the message.

    Raises:
        AssertionError: The value was not true within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {timeout} s still no {event}\n{more()}"
        time.sleep(0.3)
    return value


def read_heartbeat(run_dir: Path, rank: int) -> dict | None:
    """Return the heartbeat of a rank of node 0 of a running launch; None before the first."""
    for _ in range(2):  # a row may be read while it is written
        with contextlib.suppress(OSError, ValueError, KeyError):
            table = Path(json.loads((run_dir / "status.json").read_text())["heartbeats"])
            with table.open("rb") as file:
                return read_row(file.fileno(), rank)
    return None


def wait_for_heartbeat(
    run_dir: Path, rank: int, holds: Callable[[dict], bool], timeout: float = 60
) -> dict:
    """Wait until `holds` is true for the heartbeat of a rank of the launch, and return it."""
    return wait_for(
        f"expected heartbeat of rank {rank} in {run_dir}",
        lambda: (record := read_heartbeat(run_dir, rank)) and holds(record) and record,
        timeout,
    )


def read_metrics(run_dir: Path) -> list[dict]:
    return read_epochs(run_dir / "metrics.jsonl")


def read_steps(run_dir: Path) -> list[dict]:
    return [row for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "step"]


def newest(run_dir: Path) -> dict:
    """Return the newest checkpoint of a run."""
    return torch.load(max(run_dir.glob("checkpoints/step_*.pt")), weights_only=True)


def only_run(runs_dir: Path) -> Path:
    (run_dir,) = runs_dir.iterdir()
    return run_dir


def main_in_world(*overrides: str) -> str:
    """Run train.py on this rank with the given Hydra overrides, and return what it prints."""
    sys.argv = ["train.py", *overrides]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    return printed.getvalue()


def refusal_in_world(line: str) -> tuple[object, str]:
    """Run train.py with overrides that it rejects; return exit code and this rank's stderr.

    An AssertionError is raised if a process group is opened.
    """

    init = dist.init_process_group
    sleep = time.sleep
    search_path = sys.path.copy()

    def opened(backend=None, **kwargs):
        if backend != "fake":  # the one of a plan
            raise AssertionError("a process group was opened")
        init(backend, **kwargs)

    dist.init_process_group = opened
    time.sleep = lambda seconds: None  # the ranks that do not report the error sleep first
    with tempfile.TemporaryFile("w+") as printed, contextlib.redirect_stderr(printed):
        try:
            main_in_world(*line.split())
            code = 0
        except SystemExit as error:
            code = error.code
        finally:  # some tests call this in their own process
            dist.init_process_group = init
            time.sleep = sleep
            sys.path[:] = search_path
        printed.seek(0)
        return code, printed.read()
