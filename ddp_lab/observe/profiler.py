"""profile=true: record some steps on every rank with torch.profiler. Where their time went is reported by profile_report.py.

Nothing is synchronised within these steps, because the times of the kernels are read from the trace (trace.py). The recorded
steps are slower than others, because recording each operation costs the host time. Use the fractions of a step from here and
the throughput from other epochs.
"""

import gc
import gzip
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_lab.config.errors import ConfigError
from ddp_lab.observe.log import log
from ddp_lab.observe.logger import Logger
from ddp_lab.observe.profile_report import report
from ddp_lab.observe.trace import DATA, STEP, bytes_per_step, read
from ddp_lab.world.device import peak_memory_bytes
from ddp_lab.world.runtime import Runtime

SKIP, RECORD = 5, 11  # steps; the first recorded one is dropped, because the profiler still initialises in it
NEEDED = SKIP + RECORD


def check_profile(steps: int, device: torch.device) -> None:
    """Check that a run can be profiled.

    Args:
        steps: training steps of the run.
        device: the device of this rank.

    Raises:
        ConfigError: the run has too few steps, or torch.profiler does not support the device.
    """
    if device.type == "mps":
        raise ConfigError(
            "profile=true: is not supported on device=mps: torch.profiler does not record its kernels. Use device=cpu"
        )
    if steps < NEEDED:
        raise ConfigError(f"profile=true: needs {NEEDED} steps of training, and this run has {steps}; raise epochs")


class WrappedStep(Protocol):
    """The part of `training.step.TrainStep` that is used here. Its types are `Any`, to import nothing from `training`."""

    @property
    def running_sums(self) -> Any: ...

    @property
    def lr(self) -> float: ...

    def batches(self, loader: Any) -> Iterable[Any]: ...

    def __call__(self, batch: Any) -> None: ...


class Profiled:
    """A `training.step.TrainStep` that wraps another one and profiles some of its steps.

    Args:
        step: the step to wrap.
        runtime: the process group.
        logger: gets the table and the diagnosis.
        folder: directory for summary.json, a trace of each rank for Perfetto or chrome://tracing, and, when the logger is
            closed, time_split.png.
        graph: whether the step replays a CUDA graph.
        bubble: a pipeline's bubble by the formula, as a fraction of a step; None for other strategies.
    """

    def __init__(self, step: WrappedStep, runtime: Runtime, logger: Logger, folder: Path, graph: bool, bubble: float | None):
        self.step, self.runtime, self.logger, self.folder = step, runtime, logger, folder
        self.graph, self.bubble = graph, bubble
        self.taken = 0
        if runtime.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier launch, which may have had more ranks
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise Kineto logs on every rank's stderr that there is no GPU
        gpu = [ProfilerActivity.CUDA] if runtime.device.type == "cuda" else []
        self.profiler: profile | None = profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True)

    @property
    def running_sums(self) -> Any:
        """The running_sums of the wrapped step."""
        return self.step.running_sums

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return self.step.lr

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of the wrapped step; each request is a range DATA in the trace."""
        batches = iter(self.step.batches(loader))
        while True:
            with record_function(DATA):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def __call__(self, batch: Any) -> None:
        """Take one step. Start the profiler after SKIP steps, and stop it after NEEDED steps."""
        with record_function(STEP):
            self.step(batch)
        self.taken += 1
        if self.profiler is not None:
            if self.taken == SKIP:
                # Some versions of torch warn that events of one cycle are kept. Option acc_events, which prevents that, also
                # makes a list of all events in Python: 20 s for ViT-L/16.
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.profiler.start()
            elif self.taken == NEEDED:
                self._finish(self.profiler)

    def end(self) -> None:
        """Stop the profiler if this launch, finished or interrupted, ends before the profile is complete."""
        if self.profiler is not None:
            if self.taken >= SKIP:
                self.profiler.stop()
            log.info(f"profile=true: this launch ended before its {NEEDED}th step; there is no profile")

    def _finish(self, profiler: profile) -> None:
        """Write this rank's trace; rank 0 also collects and reports the steps of all ranks."""
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize()
        profiler.stop()
        self.folder.mkdir(exist_ok=True)
        trace = save_trace(profiler, self.folder / f"rank{self.runtime.rank}.json.gz")
        self.profiler = None
        devices = {device: steps[1:] for device, steps in read(trace).items()}
        mine = {"devices": devices, "peak_memory_bytes": peak_memory_bytes(), "bytes_per_step": bytes_per_step(trace)}
        if ranks := self.runtime.collect("profile", json.dumps(mine)):
            report([json.loads(rank) for rank in ranks], RECORD - 1, self.logger, self.folder, self.graph, self.bubble)


def save_trace(profiler: profile, path: Path) -> dict[str, Any]:
    """Write the trace of a profiler that has stopped to `path`, compressed, and return its content."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        content = Path(file.name).read_bytes()
    path.write_bytes(gzip.compress(content, compresslevel=1))  # level 9 takes several times as long
    collected = gc.isenabled()
    gc.disable()  # while objects are only made, collections find nothing; with them, loading 96 MB takes 5 s in place of 1.5
    try:
        return json.loads(content)
    finally:
        if collected:
            gc.enable()
