"""profile=true: records some steps on every rank with torch.profiler, and says where their time went.

Nothing is synchronised within these steps: the kernels' own times are read (trace.py). The recorded steps are slower than
others, by what noting each operation costs the host; take shares of a step from here, and rates from other epochs.
"""

import gzip
import json
import os
import shutil
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_lab.config.errors import ConfigError
from ddp_lab.observe.logger import Logger, log, peak_memory_bytes
from ddp_lab.observe.plot import beside, stacked
from ddp_lab.observe.time_split import PARTS, split, summarise, verdict
from ddp_lab.observe.trace import DATA, STEP, Call, StepTrace, bytes_per_step, read, union
from ddp_lab.world.runtime import Runtime

SKIP, RECORD = 5, 11  # steps; the first recorded one does not count, because the profiler is still settling in it
NEEDED = SKIP + RECORD


def check_profile(steps: int, device: torch.device) -> None:
    """
    Raises:
        ConfigError: a run of so many steps ends before there is something to report, or the device's times cannot be read.
    """
    if device.type == "mps":
        raise ConfigError(
            "profile=true: is not supported on device=mps: torch.profiler does not record its kernels. Use device=cpu"
        )
    if steps < NEEDED:
        raise ConfigError(f"profile=true: needs {NEEDED} steps of training, and this run has {steps}; raise epochs")


class Profiled:
    """A `training.step.TrainStep` that takes the steps of another one and records some of them.

    It imports nothing of that room, which lies above this one.

    Args:
        graph: the step replays a CUDA graph.
        bubble: of a pipeline, by the formula.
        folder: gets a trace of each rank, for Perfetto or chrome://tracing, and summary.json; when the logger is closed,
            time_split.png.
    """

    def __init__(self, step: Callable, runtime: Runtime, logger: Logger, folder: Path, graph: bool, bubble: float | None):
        self.step, self.runtime, self.logger, self.folder = step, runtime, logger, folder
        self.graph, self.bubble = graph, bubble
        self.taken = 0
        if runtime.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # an earlier launch's, of more ranks maybe
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes to stderr, on every rank, that there is no GPU
        gpu = [ProfilerActivity.CUDA] if runtime.device.type == "cuda" else []
        self.profiler = profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True, acc_events=True)

    @property
    def tally(self) -> Any:
        return self.step.tally

    @property
    def lr(self) -> float:
        return self.step.lr

    def batches(self, loader: Iterable) -> Iterable:
        batches = iter(self.step.batches(loader))
        while True:
            with record_function(DATA):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def __call__(self, batch: Any) -> None:
        with record_function(STEP):
            self.step(batch)
        self.taken += 1
        if self.taken == SKIP:
            self.profiler.start()
        elif self.taken == NEEDED:
            self._finish()

    def end(self) -> None:
        """Behind the last step, however it was reached."""
        if self.profiler is not None:
            if self.taken >= SKIP:
                self.profiler.stop()
            log.info(f"profile=true: this launch ended before its {NEEDED}th step; there is no profile")

    def _finish(self) -> None:
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize()
        self.profiler.stop()
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"rank{self.runtime.rank}.json.gz"
        self.profiler.export_chrome_trace(str(path))
        self.profiler = None
        with gzip.open(path) as file:
            trace = json.load(file)
        devices = {device: steps[1:] for device, steps in read(trace).items()}
        mine = {"devices": devices, "peak_memory_bytes": peak_memory_bytes(), "bytes_per_step": bytes_per_step(trace)}
        if ranks := self.runtime.collect("profile", json.dumps(mine)):
            self._report([json.loads(rank) for rank in ranks])

    def _report(self, ranks: list[dict[str, Any]]) -> None:
        rows = split([{device: list(map(restore, steps)) for device, steps in rank["devices"].items()} for rank in ranks])
        for row in rows:
            row |= summarise(row)
        words = verdict(rows, self.graph, self.bubble)
        kept = {key: [rank[key] for rank in ranks] for key in ("peak_memory_bytes", "bytes_per_step")}
        (self.folder / "summary.json").write_text(json.dumps({"rows": rows, "verdict": words, **kept}, indent=1))
        self.logger.draw_at_close(partial(draw, rows), self.folder / "time_split.png")
        text = table(rows)
        log.info(f"milliseconds of a step, the medians of {RECORD - 1} (traces for ui.perfetto.dev: {self.folder})\n{text}")
        for line in words:
            log.info(line)
        self.logger.text("profile", f"```\n{text}\n```\n\n" + "\n\n".join(words))


def restore(step: list) -> StepTrace:
    """What JSON made of it."""
    start, end, compute, calls, data = step
    return StepTrace(start, end, union(map(tuple, compute)), [Call(*call) for call in calls], union(map(tuple, data)))


def table(rows: list[dict[str, Any]]) -> str:
    names = ("rank", "device", "step", *PARTS)
    lines = ["".join(f"{name:>{max(8, len(name) + 2)}}" for name in names)]
    for row in rows:
        cells = (row[name] if name in ("rank", "device") else f"{row[name]:.2f}" for name in names)
        lines.append("".join(f"{cell:>{max(8, len(name) + 2)}}" for name, cell in zip(names, cells, strict=True)))
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    bars = {f"{row['rank']} {row['device']}": {part: row[part] for part in PARTS} for row in rows}
    beside([stacked("Where a step's time goes, by rank", "ms", bars)], path)


def mean_split(summary: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of PARTS, over all devices of a summary.json."""
    return {part: statistics.mean(row[part] for row in summary["rows"]) for part in PARTS}
