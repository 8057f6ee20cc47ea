"""Measure what grows with the number of steps of a run: memory, files, threads, and the time of steps and checkpoints.

python scripts/long_run.py --steps 1000000 --json long.json
python scripts/long_run.py --steps 10000 --ranks 2 strategy=ddp
python scripts/long_run.py --steps 100000 data.loader=workers ema=0.99 checkpoint.format=sharded

Starts train.py with a model of 68 parameters, whose step takes half a millisecond; everything else is that of any run. Further
arguments are Hydra overrides. The run is observed from outside: its heartbeats show when it has taken 1,000, 10,000, ... steps,
and then /proc and the run directory are read. Each measurement is in the middle of the epoch after that step. Prints a table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddp_lab.observe.metrics_file import read_epochs
from ddp_lab.resilience.checkpoint_files import digest_of
from ddp_lab.resilience.checkpoint_folder import steps_in
from ddp_lab.resilience.heartbeats import read_row
from ddp_lab.resilience.run_directory import read_json
from ddp_lab.resilience.sharded_files import is_sharded

ROOT = Path(__file__).resolve().parent.parent
BATCH = 4
DATA = {"train_size": 0, "test_size": 64, "channels": 1, "image_size": 4, "num_classes": 4}
OVERRIDES = ["data=synthetic", "model=own", "model._target_=scripts.long_run.tiny", f"batch_size={BATCH}", "device=cpu"]
POLL = 0.01  # seconds


def tiny(in_channels: int, image_size: int, num_classes: int) -> nn.Module:
    """Return a model whose step takes as little time as possible."""
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))


@dataclass
class Measurement:
    """The state of a run after a number of steps. Sizes are in bytes.

    Attributes:
        memory: resident memory of each process: of the ranks in their order, then of rank 0's worker processes.
        threads, open_files: of all these processes.
        sizes: of the files in the run directory, by kind. "all": of all files; one that has two names counts once.
        step_ms: time of a step in the fastest epoch since the previous measurement, without evaluation and checkpoints.
        cpu_ms: processor time of rank 0 per step since the previous measurement, with everything.
        checkpoint_ms: time in which the newest checkpoint was written, from making its file or directory to the last renaming.
    """

    steps: int
    memory: list[int]
    threads: int
    open_files: int
    sizes: dict[str, int]
    step_ms: float
    cpu_ms: float
    checkpoint_ms: float


KINDS = {"metrics.jsonl": "metrics.jsonl", "events": "events.*", "train.log": "train.log", "status.json": "status.json"}
KINDS |= {"checkpoints": "checkpoints/**/*"}


def sizes_of(run_dir: Path) -> dict[str, int]:
    """Return the sizes of the files in a run directory, by kind."""

    def size(pattern: str) -> int:
        sizes: dict[int, int] = {}  # by inode
        for path in run_dir.glob(pattern):
            with suppress(FileNotFoundError):  # a checkpoint that is just replaced
                if path.is_file():
                    sizes[path.stat().st_ino] = path.stat().st_size
        return sum(sizes.values())

    return {kind: size(pattern) for kind, pattern in (KINDS | {"all": "**/*"}).items()}


def checkpoint_ms(run_dir: Path) -> float:
    """Return the time in which the newest checkpoint was written."""
    newest = steps_in(run_dir / "checkpoints")[-1]
    # Python's `stat` does not have the time at which a file was made.
    made = subprocess.run(["stat", "--format=%.6W", newest], capture_output=True, text=True, check=True).stdout
    renamed = newest if is_sharded(newest) else digest_of(newest)
    return 1000 * (renamed.stat().st_ctime - float(made))


class Observer:
    """Measures a run from outside.

    Args:
        run_dir: the run directory.
        epoch_steps: steps of an epoch.
        ranks: of the run.
    """

    def __init__(self, run_dir: Path, epoch_steps: int, ranks: int):
        self.run_dir, self.epoch_steps, self.ranks = run_dir, epoch_steps, ranks
        self._cpu, self._steps, self._epochs = 0.0, 0, 0  # at the previous measurement

    def heartbeats(self) -> list[dict[str, Any]]:
        """Return the heartbeats of the ranks; none before the first and after the last."""
        try:
            with Path((read_json(self.run_dir / "status.json") or {})["heartbeats"]).open("rb") as file:
                rows = [read_row(file.fileno(), rank) for rank in range(self.ranks)]
        except (KeyError, OSError):
            return []
        return [row for row in rows if row]

    def has_taken(self, steps: int) -> bool:
        """Return whether the run is in the middle of the epoch after so many steps, or later."""
        first = self.heartbeats()[:1]
        return any(beat["doing"] == "training" and beat["step"] > steps + self.epoch_steps // 2 for beat in first)

    def measure(self, steps: int) -> Measurement:
        """Return the state of the run after `steps` steps."""
        beats = self.heartbeats()
        ranks = [psutil.Process(beat["pid"]) for beat in beats]
        processes = [*ranks, *ranks[0].children(recursive=True)]
        memory = [process.memory_info().rss for process in processes]
        threads, files = sum(each.num_threads() for each in processes), sum(each.num_fds() for each in processes)
        times = ranks[0].cpu_times()
        cpu, taken = times.user + times.system - self._cpu, beats[0]["step"] - self._steps
        self._cpu, self._steps = self._cpu + cpu, beats[0]["step"]
        rows = read_epochs(self.run_dir / "metrics.jsonl")[self._epochs :]
        self._epochs += len(rows)
        step_ms = 1000 * min(row["seconds"] for row in rows) / self.epoch_steps
        sizes, saved = sizes_of(self.run_dir), checkpoint_ms(self.run_dir)
        return Measurement(steps, memory, threads, files, sizes, step_ms, 1000 * cpu / taken, saved)


def command(steps: int, epoch_steps: int, ranks: int, runs_dir: Path, overrides: list[str]) -> list[str]:
    """Return the command of the run, with more epochs than needed, so that the last measurement is not missed."""
    data = DATA | {"train_size": BATCH * epoch_steps}
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", f"--nproc_per_node={ranks}"]
    run = [f"epochs={-(-steps // epoch_steps) + 5}", f"runs_dir={runs_dir}", "name=long"]
    options = [*OVERRIDES, *(f"data.dataset.{key}={value}" for key, value in data.items()), *run, *overrides]
    return [*([sys.executable] if ranks == 1 else torchrun), "train.py", *options]


def observe(process: subprocess.Popen[bytes], observer: Observer, steps: int) -> list[Measurement]:
    """Measure a run after 1,000, 10,000, ... `steps` steps, but not within its first epoch.

    Raises:
        SystemExit: the run has ended before.
    """
    measured: list[Measurement] = []
    for mark in (mark for mark in (10**power for power in range(3, 10)) if observer.epoch_steps <= mark <= steps):
        while not observer.has_taken(mark):
            if process.poll() is not None:
                sys.exit(f"error: the run has ended before step {mark:,} with exit code {process.returncode}")
            time.sleep(POLL)
        measured.append(observer.measure(mark))
        print(table(measured[-1:], header=len(measured) == 1), flush=True)
    return measured


def table(measured: list[Measurement], header: bool = True) -> str:
    """Return measurements as rows of a table in Markdown. Sizes are in KiB, memory in MiB."""
    columns = ["steps", "memory", "threads", "open files", *KINDS, "directory", "ms/step", "CPU ms/step", "checkpoint ms"]
    rows = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"] if header else []
    for made in measured:
        memory = " + ".join(f"{size / 2**20:.1f}" for size in made.memory)
        cells = [f"{made.steps:,}", memory, made.threads, made.open_files]
        cells += [f"{size / 2**10:,.1f}" for size in made.sizes.values()]
        cells += [f"{made.step_ms:.3f}", f"{made.cpu_ms:.3f}", f"{made.checkpoint_ms:.1f}"]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="steps before the last measurement")
    parser.add_argument("--epoch-steps", type=int, default=1000, help="steps of an epoch")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks")
    parser.add_argument("--json", type=Path, help="file for the measurements")
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        line = command(arguments.steps, arguments.epoch_steps, arguments.ranks, Path(folder), overrides)
        with (Path(folder) / "output").open("wb") as output, subprocess.Popen(line, cwd=ROOT, stdout=output) as process:
            try:
                measured = observe(
                    process, Observer(Path(folder) / "long", arguments.epoch_steps, arguments.ranks), arguments.steps
                )
            except BaseException:
                process.terminate()
                process.wait()
                raise
    if process.returncode:
        sys.exit(f"error: exit code {process.returncode}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(made) for made in measured], indent=1))


if __name__ == "__main__":
    main()
