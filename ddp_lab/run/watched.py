"""What the page of `ddp-lab watch` shows of a run, from the files of its directory.

It does not import torch, and changes nothing but the request for stacks.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ddp_lab.config.errors import ConfigError
from ddp_lab.config.types import SETS
from ddp_lab.launchers.recorded_config import CONFIG, RANKS
from ddp_lab.observe.metrics_file import OTHERS, is_epoch, kinds_of, parse_row
from ddp_lab.resilience import stacks
from ddp_lab.resilience.run_directory import read_json
from ddp_lab.run.lights import Lights, over
from ddp_lab.run.runs import state_of

MOST_POINTS = 500  # of a line that is drawn
LOG_LINES = 40
LOG_BYTES = 64 * 2**10  # of the end of the log that are read
MOST_ANSWERS = 16  # ranks whose stacks are shown; the files have those of all
STEPS = "train, by step"
CONSTANTS = ("kind", "global_batch_size", "world_size", "strategy", "seconds", "energy_kWh")


@dataclass
class Line:
    """A curve that keeps at most a thousand points, evenly spread, and the last one.

    Attributes:
        points: (step, value).
        last: the last one.
    """

    points: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    last: tuple[int, float] | None = None
    _stride: int = 1
    _count: int = 0

    def add(self, step: int, value: float) -> None:
        """Add a point."""
        self.last = step, value
        if self._count % self._stride == 0:
            self.points.append(self.last)
        self._count += 1
        if len(self.points) > 2 * MOST_POINTS:
            self.points = self.points[::2]
            self._stride *= 2

    def shown(self) -> list[tuple[int, float]]:
        """Return the points, the last one included."""
        if self.last is None or self.points[-1] == self.last:
            return self.points
        return [*self.points, self.last]


class Metrics:
    """The curves of metrics.jsonl. Each call of `read` reads only what is new.

    Args:
        path: the file.

    Attributes:
        charts: lines by the metric and their name.
        newest: the last row of steps and of an epoch, by kind.
    """

    def __init__(self, path: Path):
        self.path = path
        self._begin(0)

    def _begin(self, inode: int) -> None:
        self.charts: dict[str, dict[str, Line]] = {}
        self.newest: dict[str, dict[str, Any]] = {}
        self._inode = inode
        self._offset = 0

    def read(self) -> None:
        """Read the rows that were added; all of them if a launch that resumes has removed some."""
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._begin(status.st_ino)
            file.seek(self._offset)
            complete, end, _ = file.read().rpartition(b"\n")  # a row may be half written
        self._offset += len(complete) + len(end)
        for line in complete.splitlines():
            row = parse_row(line)
            if isinstance(row, dict) and "step" in row:  # old versions wrote none
                self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        kind = "epoch" if is_epoch(row) else row["kind"]
        self.newest[kind] = row
        for title, name, value in values_of(row):
            lines = self.charts.setdefault(title, {})
            lines.setdefault(name, Line()).add(row["step"], value)


def values_of(row: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Return what is drawn of a row: the titles of charts, the names of lines, and the values."""
    if row.get("kind") == "step":
        for key, value in row.items():
            is_number = isinstance(value, (int, float))
            if is_number and key not in (*OTHERS, *CONSTANTS):
                yield key, STEPS, value
        if isinstance(row.get("samples_per_second"), (int, float)):
            yield "samples per second", STEPS, row["samples_per_second"]
        return
    for kind in kinds_of([row]):
        for name in SETS:
            value = row.get(f"{name}_{kind}")
            if value is not None:
                yield kind, name, value
    if row.get("samples_per_second") is not None:
        yield "samples per second", "by epoch", row["samples_per_second"]


class Watched:
    """A run that is watched.

    Args:
        path: the run directory.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lights = Lights(path)
        self._metrics = Metrics(path / "metrics.jsonl")
        self._red: set[int] = set()

    def state(self) -> dict[str, Any]:
        """Return the state of the run, its lights, numbers and last log lines."""
        self._metrics.read()
        state = state_of(self.path)
        status = read_json(self.path / "status.json") or {}
        failure = read_json(self.path / "failure.json")
        problem = ""
        ranks = self._number_of_ranks()
        if state == "running":
            lights, problem = self._lights.look(ranks)
        else:
            failed = failure["rank"] if failure else None
            lights = over(max(1, ranks), status.get("step"), failed, state)
        self._red = {light.rank for light in lights if light.colour == "red"}
        return {
            "name": self.path.name,
            "state": state,
            "time": time.time(),
            "lights": [light._asdict() for light in lights],
            "problem": problem,
            "failure": failure["message"] if failure else "",
            "numbers": describe_numbers(self._metrics.newest),
            "log": last_lines(self.path / "train.log"),
            "request": stacks.requested(self.path),
        }

    def curves(self) -> dict[str, dict[str, list[tuple[int, float]]]]:
        """Return the points of each line, by the metric and the line's name."""
        self._metrics.read()
        return {
            title: {name: line.shown() for name, line in lines.items()}
            for title, lines in self._metrics.charts.items()
        }

    def ask_for_stacks(self) -> str:
        """Ask the ranks for their stacks; return the number of the request.

        Raises:
            ConfigError: no rank is running, or the run directory cannot be written.
        """
        state = state_of(self.path)
        if state != "running":
            raise ConfigError(f"the run is {state}: no rank can answer")
        try:
            return stacks.request(self.path)
        except OSError as error:
            raise ConfigError(
                f"{self.path}: the request cannot be written ({error.strerror})"
            ) from None

    def answers(self) -> dict[str, Any]:
        """Return the answers to the last request for stacks, those of red ranks first."""
        number = stacks.requested(self.path)
        if number is None:
            return {"request": None, "folder": "", "answers": [], "answered": []}
        texts = stacks.answers(self.path, number)
        order = sorted(texts, key=lambda rank: (rank not in self._red, rank))
        shown = [(rank, texts[rank]) for rank in order[:MOST_ANSWERS]]
        folder = self.path / stacks.STACKS / number
        return {
            "request": number,
            "folder": str(folder),
            "answers": shown,
            "answered": list(texts),
        }

    def _number_of_ranks(self) -> int:
        """Return the number of ranks of the last launch; 0: unknown."""
        try:
            with (self.path / CONFIG).open(errors="replace") as file:
                first = file.readline()
        except OSError:
            return 0
        match = re.fullmatch(rf"# {RANKS}: (\d+)\n", first)
        return int(match[1]) if match else 0


def describe_numbers(newest: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return names and texts of what the last rows say of speed, memory and energy."""
    rows = [newest[kind] for kind in ("step", "epoch") if kind in newest]  # no other has a speed
    if not rows:
        return []
    row = max(rows, key=lambda row: row["step"])
    texts = [("epoch", f"{row['epoch']}"), ("step", f"{row['step']:,}")]
    if row.get("samples_per_second") is not None:
        texts.append(("throughput", f"{row['samples_per_second']:,.0f} samples/s"))
    if row.get("data_wait") is not None:
        texts.append(("waiting for data", f"{row['data_wait']:.0%}"))
    if row.get("mfu") is not None:
        texts.append(("MFU", f"{row['mfu']:.1%}"))
    steps = newest.get("step", {})
    if steps.get("peak_memory_MiB") is not None:
        texts.append(("peak memory of rank 0", f"{steps['peak_memory_MiB']:,.0f} MiB"))
    if row.get("eta") is not None:
        texts.append(("left of the run", tqdm.format_interval(row["eta"])))
    epoch = newest.get("epoch", {})
    if epoch.get("energy_kWh") is not None:
        texts.append(("energy", f"{epoch['energy_kWh']:.4g} kWh"))
    return texts


def last_lines(path: Path) -> str:
    """Return the last lines of a log; "" if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-LOG_LINES:])
