"""profile=true: record some steps on every rank with torch.profiler; report where their time went.

Nothing is synchronised within these steps, because the times of the kernels are read from the trace
(time_split.py). The recorded steps are slower than others, because recording each operation costs
the host time. Use the fractions of a step from here and the throughput from other epochs.
"""

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from ddp_lab.config.errors import ConfigError
from ddp_lab.observe.log import log
from ddp_lab.observe.logger import Logger
from ddp_lab.observe.time_split import DATA, PARTS, STEP, compare, diagnose, read
from ddp_lab.observe.trackers.base import Status
from ddp_lab.training.hooks import Hook, Run
from ddp_lab.training.progress import Progress
from ddp_lab.world.device import peak_memory_bytes
from ddp_lab.world.runtime import Runtime

SKIP = 5  # steps before the profile
RECORD = 10  # steps of the profile
NEEDED = SKIP + 1 + RECORD  # in the step between them the profiler initialises


def check_profile(steps: int | None, device: torch.device) -> None:
    """Check that a run can be profiled.

    Args:
        steps: training steps of the run; None: that is not known.
        device: the device of this rank.

    Raises:
        ConfigError: the run has too few steps, or torch.profiler does not support the device.
    """
    if device.type == "mps":
        raise ConfigError(
            "profile=true: is not supported on device=mps: torch.profiler does not record its "
            "kernels. Use device=cpu"
        )
    if steps is not None and steps < NEEDED:
        raise ConfigError(
            f"profile=true: needs {NEEDED} steps of training, and this run has {steps}; raise "
            "epochs"
        )


class Profiled(Hook):
    """Profiles some steps, each of which is a range STEP in the trace.

    It is the first hook: what others do belongs to no step.

    Args:
        runtime: the process group.
        logger: gets the table and the diagnosis.
        folder: directory for summary.json and a trace of each rank for Perfetto or
            chrome://tracing.
        graph: whether the step replays a CUDA graph.
        bubble: a pipeline's bubble by the formula, as a fraction of a step; None for other
            strategies.

    Attributes:
        loading: must be the last hook.
    """

    def __init__(
        self, runtime: Runtime, logger: Logger, folder: Path, graph: bool, bubble: float | None
    ):
        self.runtime = runtime
        self.logger = logger
        self.folder = folder
        self.graph = graph
        self.bubble = bubble
        self.loading = Loading()
        self._is_closed = False
        if runtime.is_main:
            # of an earlier launch, which may have had more ranks
            shutil.rmtree(folder, ignore_errors=True)

        # otherwise Kineto logs on every rank's stderr that there is no GPU
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        gpu = [ProfilerActivity.CUDA] if runtime.device.type == "cuda" else []
        plan = schedule(wait=SKIP, warmup=1, active=RECORD, repeat=1)
        self.profiler = profile(
            activities=[ProfilerActivity.CPU, *gpu], schedule=plan, on_trace_ready=self._finish
        )
        self.profiler.start()

    def before_step(self, batch: Any) -> Any:
        self.loading.end()
        self._range = record_function(STEP)
        self._range.__enter__()
        return batch

    def on_step_end(self, position: Progress) -> None:
        self._range.__exit__(None, None, None)
        if self.profiler.step_num < NEEDED:
            self.profiler.step()

    def close(self, status: Status) -> None:
        """Stop the profiler if this launch ends, finished or not, before a complete profile."""
        if self.profiler.step_num < NEEDED and not self._is_closed:
            self._is_closed = True
            self.profiler.stop()
            log.info(
                f"profile=true: this launch ended before its {NEEDED}th step; there is no profile"
            )

    def _finish(self, profiler: profile) -> None:
        """Write this rank's trace; rank 0 also collects and reports the steps of all ranks.

        Called when the profiler stops.
        """
        if profiler.step_num < NEEDED:
            return
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"rank{self.runtime.rank}.json.gz"
        profiler.export_chrome_trace(str(path))
        with gzip.open(path) as file:
            mine = {"devices": read(json.load(file)), "peak_memory_bytes": peak_memory_bytes()}
        if ranks := self.runtime.gather_objects("profile", json.dumps(mine)):
            self._report([json.loads(rank) for rank in ranks])

    def _report(self, ranks: list[dict[str, Any]]) -> None:
        """Log the time split of all ranks and its diagnosis, and write summary.json."""
        rows = compare([rank["devices"] for rank in ranks], pipeline=self.bubble is not None)
        diagnosis = diagnose(rows, self.graph, self.bubble)
        summary = {
            "rows": rows,
            "diagnosis": diagnosis,
            "peak_memory_bytes": [rank["peak_memory_bytes"] for rank in ranks],
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=1))
        text = table(rows)
        log.info(
            f"milliseconds of a step, the means of {RECORD} (traces for ui.perfetto.dev: "
            f"{self.folder})\n{text}"
        )
        for line in diagnosis:
            log.info(line)
        self.logger.text("profile", f"```\n{text}\n```\n\n" + "\n\n".join(diagnosis))


class Loading(Hook):
    """Makes each request of a batch a range DATA in the trace of `Profiled`.

    It is the last hook, and begins the range.
    """

    def __init__(self) -> None:
        self._range: record_function | None = None

    def on_start(self, run: Run) -> None:
        self._size = run.loaders["train"].data.size
        self._begin()

    def on_step_end(self, position: Progress) -> None:
        if position.samples < self._size:
            self._begin()

    def on_epoch_end(self, position: Progress) -> None:
        self._begin()

    def _begin(self) -> None:
        self.end()  # of an epoch that was resumed at its end
        self._range = record_function(DATA)
        self._range.__enter__()

    def end(self) -> None:
        """End the range, because the batch has arrived."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as an aligned text table, times in milliseconds."""
    names = ("rank", "device", "step", *PARTS)
    lines = [
        names,
        *(
            [row["rank"], row["device"], *(f"{row[name]:.2f}" for name in names[2:])]
            for row in rows
        ),
    ]
    widths = [max(8, len(name) + 2) for name in names]
    return "\n".join(
        "".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
