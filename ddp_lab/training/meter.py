"""The metrics of the steps within an epoch: rows of metrics.jsonl, and of the console.

They are those of all ranks.
"""

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ddp_lab.observe.logger import Logger
from ddp_lab.tasks.base import Task
from ddp_lab.training.hooks import Hook, Run
from ddp_lab.training.metrics import Evaluation, means
from ddp_lab.training.plan import FitSettings
from ddp_lab.training.progress import Progress
from ddp_lab.training.sync import PERIOD, Exchanged
from ddp_lab.world.device import peak_memory_bytes


class Snapshot(NamedTuple):
    """A position in an epoch: samples and sums so far over all ranks, and this rank's time."""

    samples: int
    sums: list[float]
    time: float
    waited: float


class Meter(Hook):
    """Makes rows of what the ranks exchange: means over the steps since the last row.

    Each sample counts once in them. Their time is that of rank 0; `data_wait` is the share of it in
    which a rank waited for its batches, on average over the ranks.

    Args:
        task: what is trained for.
        settings: when a row is recorded, the last epoch, and the rate of the devices.
        logger: gets the rows, and what is shown.
    """

    def __init__(self, task: Task, settings: FitSettings, logger: Logger):
        self.task = task
        self.settings = settings
        self.logger = logger
        self._shown_at = time.perf_counter()

    def on_start(self, run: Run) -> None:
        self._size = run.loaders["train"].data.size
        self._is_endless = run.loaders["train"].data.is_endless
        self._batch_size = run.loaders["train"].batch_size
        self._zeros = [0.0] * len(run.eager.running_sums.totals)
        self._begin(run.position)

    def on_epoch_end(self, position: Progress) -> None:
        self._begin(position)

    def on_evaluated(
        self, position: Progress, results: Mapping[str, Evaluation], seconds: float
    ) -> None:
        self._begun_at += seconds
        self._shown = self._shown._replace(time=self._shown.time + seconds)
        self._recorded = self._recorded._replace(time=self._recorded.time + seconds)

    def _begin(self, before: Progress) -> None:
        """Begin with the remaining steps of an epoch, at the position `before`."""
        self._begun_at = time.perf_counter()
        self._trained = before.seconds_trained
        self._shown = Snapshot(before.samples, before.sums or self._zeros, self._begun_at, 0.0)
        self._recorded = self._shown._replace(sums=before.recorded or self._zeros)

    def read(self, exchanged: Exchanged) -> None:
        """Record and show what the ranks have exchanged after a step, if that is due."""
        snapshot = Snapshot(
            exchanged.position.samples, exchanged.sums, exchanged.time, exchanged.waited
        )
        if exchanged.is_row:
            self.logger.steps(self._row(exchanged, self._recorded, snapshot))
            self._recorded = snapshot
        shown_every = min(self.logger.show_every, self.settings.log_every.seconds or math.inf)
        if exchanged.time - self._shown_at >= shown_every - PERIOD / 2:
            self.logger.show(self._row(exchanged, self._shown, snapshot))
            self._shown = snapshot
            self._shown_at = exchanged.time

    def _row(self, exchanged: Exchanged, since: Snapshot, snapshot: Snapshot) -> Mapping[str, Any]:
        at = exchanged.position
        seconds = snapshot.time - since.time
        rate = (snapshot.samples - since.samples) / seconds
        left = self._size - snapshot.samples
        sums = [now - before for before, now in zip(since.sums, snapshot.sums, strict=True)]
        row: dict[str, Any] = {
            "epoch": at.epoch,
            "step": at.step,
            **means(self.task, sums),
            "lr": at.lr,
        }
        row["samples_per_second"] = rate
        row["data_wait"] = (snapshot.waited - since.waited) / seconds

        if exchanged.gradient_norm is not None:
            row["gradient_norm"] = exchanged.gradient_norm
        if self.settings.full_rate:
            row["mfu"] = rate / self.settings.full_rate
        row["peak_memory_MiB"] = peak_memory_bytes() / 2**20
        row["eta_epoch"] = left / rate
        row["eta"] = self._seconds_left(exchanged, left, rate)
        if self._is_endless:  # the run is one epoch
            row["eta_epoch"] = row["eta"]
        return row

    def _seconds_left(self, exchanged: Exchanged, left: int, rate: float) -> float:
        """Return the seconds until the end of the run at the present speed.

        Args:
            exchanged: after the last step.
            left: samples of the epoch that are left.
            rate: samples per second.
        """
        settings = self.settings
        at = exchanged.position
        samples = math.inf
        if settings.epochs is not None:
            samples = left + (settings.epochs - at.epoch) * self._size
        if settings.last_step is not None:
            samples = min(samples, (settings.last_step - at.step) * self._batch_size)
        trained = self._trained + exchanged.time - self._begun_at
        return min(samples / rate, settings.seconds_left(at) + at.seconds_trained - trained)
