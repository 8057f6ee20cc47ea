"""Runs as processes of their own: jobs of sweeps, and measurements.

The latter are those of `ddp-lab advise --measure` and scripts/.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ddp_lab.config.compose import quote
from ddp_lab.launchers.command import REFUSED
from ddp_lab.observe.metrics_file import read_epochs
from ddp_lab.resilience.run_directory import read_json

ROOT = Path(__file__).parents[2]
IS_CLONE = (ROOT / "pyproject.toml").is_file()  # which may not be installed
# of a rank; train.py finds ddp_lab from any directory
ENTRY = [str(ROOT / "train.py")] if IS_CLONE else ["-m", "ddp_lab"]


def search_path() -> str:
    """Return the PYTHONPATH with which a process imports ddp_lab as this one does; "": none."""
    folders = [str(ROOT)] if IS_CLONE else []
    folders += filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join(folders)


def command_of(overrides: Sequence[str], ranks: int | None) -> tuple[list[str], dict[str, str]]:
    """Return the command that trains with `overrides` on `ranks` ranks, and its environment.

    With None it trains in one process alone.
    """
    train = ENTRY if ranks is None else ["-m", "ddp_lab", "train", "--nproc", str(ranks)]
    return [sys.executable, *train, *overrides], os.environ | {"PYTHONPATH": search_path()}


class ShortRun(NamedTuple):
    """The outcome of a run of train.py.

    Attributes:
        records: of the epochs, as in metrics.jsonl.
        profile: as in summary.json; None without profile=true.
        problem: why it did not run; None if it did.
        refused: whether that is an error in the config.
    """

    records: list[dict[str, Any]]
    profile: dict[str, Any] | None
    problem: str | None = None
    refused: bool = False

    @property
    def rates(self) -> list[float]:
        """Samples per second of the epochs.

        The first epoch, which tunes and is profiled, counts only if it is the only one.
        """
        return [record["samples_per_second"] for record in self.records[1:] or self.records]


def run_in_time(
    command: Sequence[str],
    environment: Mapping[str, str],
    seconds: float | None,
    folder: Path | None = None,
) -> tuple[int, str]:
    """Run a launch, and end all its processes if it takes too long, or if this one is interrupted.

    Ranks that went on would disturb what is measured next.

    Args:
        command: of the launch.
        environment: of its processes.
        seconds: the most that it may take; None: it may take any time.
        folder: in which it runs; None: the current one.

    Returns:
        The exit code, and what it has printed.

    Raises:
        subprocess.TimeoutExpired: it took too long.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
    except BaseException:
        # torchrun starts each rank in a session of its own, so that no signal reaches all of them
        launched = psutil.Process(process.pid)
        for each in [launched, *launched.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
        raise
    return process.returncode, printed


def train(
    overrides: Sequence[str], ranks: int | None, out: Path, name: str, seconds: float | None = None
) -> ShortRun:
    """Run train.py once, and read what it wrote to `out`/`name`. Progress is printed.

    Args:
        overrides: of train.py.
        ranks: number of processes; None: without torchrun.
        out: directory of the run directory.
        name: of the run directory.
        seconds: the most that the run may take.
    """
    run_dir = out / name
    start = time.perf_counter()
    command, environment = command_of(
        [*overrides, f"runs_dir={quote(str(out))}", f"name={name}"], ranks
    )
    environment = {"OMP_NUM_THREADS": "1"} | environment
    print(f"{name} ...", end=" ", flush=True)
    try:
        code, printed = run_in_time(command, environment, seconds)
    except subprocess.TimeoutExpired:
        print("stopped", flush=True)
        return ShortRun([], None, "the time limit was reached")

    print(f"{time.perf_counter() - start:.0f} s", flush=True)
    (run_dir if run_dir.exists() else out).joinpath(f"{name}.output.txt").write_text(printed)
    if code:
        failure = read_json(run_dir / "failure.json")
        errors = [line.strip() for line in printed.splitlines() if "error: " in line]
        if failure:
            reason = failure["message"]
        elif errors:
            reason = errors[-1]
        else:
            reason = f"exit code {code}"
        return ShortRun([], None, in_one_line(reason), refused=code == REFUSED)

    return ShortRun(
        read_epochs(run_dir / "metrics.jsonl"), read_json(run_dir / "profile" / "summary.json")
    )


def in_one_line(reason: str) -> str:
    """Return a message without what follows its first line; of a traceback its first and last line.

    Args:
        reason: the message of a failed run.
    """
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    first = lines[0].partition("error: ")[2] or lines[0]
    return f"{first} {lines[-1]}" if first.endswith(":") and len(lines) > 1 else first
