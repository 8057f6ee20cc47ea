"""Starting train.py: as a user does, in a subprocess, and inside a world of the tests' ranks."""

import contextlib
import fcntl
import io
import json
import os
import pty
import runpy
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

import torch.distributed as dist
import warm as warm_launches

ROOT = Path(__file__).parent.parent
SMALL = [
    "data=synthetic",
    "data.dataset.train_size=100",
    "data.dataset.test_size=50",
    "model=simple_cnn",
    "batch_size=24",
    "optimizer.lr=0.01",
]
# A model with BatchNorm in place of ResNet-18, whose ten million parameters would take most of a short launch's time.
NARROW = ["model=lenet", "model._target_=training.narrow_resnet", "model.init_std=null", "data.dataset.image_size=16"]
METRICS = {
    "epoch",
    "train_loss",
    "train_accuracy",
    "test_loss",
    "test_accuracy",
    "lr",
    "seconds",
    "samples_per_second",
    "global_batch_size",
    "world_size",
    "strategy",
}


def start(line: str, *more: str, gpus: bool = False, cold: bool = False, stderr: int = subprocess.STDOUT) -> subprocess.Popen:
    """Starts a launch line in the repository with this Python; without GPUs unless asked.

    Forked from the server of warm.py where there is one. `cold`, and with GPUs: new interpreters, as from the shell.
    """
    program, *words = line.split()
    command = [str(Path(sys.executable).with_name(program)), *words, *more]
    hidden = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    search = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | hidden | {"OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    warm = warm_launches.ADDRESS in os.environ and warm_launches.program_of(command) and not (cold or gpus)
    popen = warm_launches.Warm if warm else subprocess.Popen
    return popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)


def finish(process: subprocess.Popen, timeout: float = 120) -> tuple[int, str]:
    """Exit code, and what was printed. A launch past its time is ended with all its ranks."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        raise AssertionError(f"not done within {timeout} s:\n{output}") from None
    return process.returncode, output


def launch(line: str, *more: str, gpus: bool = False, cold: bool = False) -> tuple[int, str]:
    return finish(start(line, *more, gpus=gpus, cold=cold))


def launch_on_terminal(line: str, *more: str) -> str:
    """What the launch writes to stderr when that is a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    written = []

    def read() -> None:  # beside the launch, which would wait for room in the terminal's small buffer
        with contextlib.suppress(OSError):  # how Linux says that the other side of a terminal is closed
            while part := os.read(ours, 4096):
                written.append(part)

    reader = threading.Thread(target=read)
    process = start(line, *more, stderr=theirs)
    os.close(theirs)
    reader.start()
    code, output = finish(process)
    reader.join()
    os.close(ours)
    assert code == 0, output
    return b"".join(written).decode()


def read_metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def only_run(runs_dir: Path) -> Path:
    (run_dir,) = runs_dir.iterdir()
    return run_dir


def main_in_world(*overrides: str) -> None:
    """A rank's train.py, with the config words given."""
    sys.argv = ["train.py", *overrides]
    with contextlib.redirect_stdout(io.StringIO()):  # the tests read the run directory
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def refusal_in_world(line: str) -> tuple[object, str]:
    """The exit code of config words that are refused, and what this rank wrote to stderr. A process group must never open."""

    def opened(*args, **kwargs):
        raise AssertionError("a process group was opened")

    dist.init_process_group = opened
    time.sleep = lambda seconds: None  # ranks that report nothing wait for torchrun
    with tempfile.TemporaryFile("w+") as printed, contextlib.redirect_stderr(printed):
        try:
            main_in_world(*line.split())
            code = 0
        except SystemExit as error:
            code = error.code
        printed.seek(0)
        return code, printed.read()
