"""The metrics of the steps within an epoch, over all ranks, without a wait for the device.

At some steps, the same on every rank, one small all_reduce adds the ranks' running sums. Its result is copied to the host while
the next steps run, and read when it has arrived, at the latest at the next such step. Clocks differ between ranks, so rank 0
says in each all_reduce how many steps lie between the next two.
"""

import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from ddp_lab.config.types import Every
from ddp_lab.observe.log import telling
from ddp_lab.observe.logger import Logger
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.metrics import RunningSums, means
from ddp_lab.training.plan import FitSettings
from ddp_lab.training.progress import Progress
from ddp_lab.world.device import peak_memory_bytes

T = TypeVar("T")
PERIOD = 1.0  # approximate seconds between two all_reduces


class Mark(NamedTuple):
    """A position in an epoch: its samples and sums so far over all ranks, and on this rank the time."""

    samples: int
    sums: list[float]
    time: float
    waited: float


class Taken(NamedTuple):
    """Sums on their way to the host, and the position after their step."""

    values: torch.Tensor
    arrived: torch.cuda.Event | None
    progress: Progress
    time: float


class Meter:
    """Measures the steps between two records. All ranks call its methods at the same steps.

    A record has the means over the steps since the last one of its epoch, in which each sample counts once. Its time is that of
    rank 0; `data_wait` is the share of it in which a rank waited for its batches, on average over the ranks.

    Args:
        strategy: whose steps are measured.
        running_sums: of these steps.
        settings: when a row is recorded, the last epoch, and the rate of the devices.
        logger: gets the rows, and what is shown.
    """

    def __init__(self, strategy: Strategy, running_sums: RunningSums, settings: FitSettings, logger: Logger):
        self.strategy, self.running_sums, self.settings, self.logger = strategy, running_sums, settings, logger
        self.every = settings.log_every
        self.period = min(PERIOD, self.every.seconds or PERIOD)
        self._taken: Taken | None = None
        self._ahead = 1  # steps from the next all_reduce to the one after it
        self._next, self._last_step = 0, -1
        self._last_time = self._recorded_at = self._shown_at = time.perf_counter()

    def begin(self, before: Progress, size: int) -> None:
        """Begin with the remaining steps of an epoch of `size` samples, at the position `before`."""
        self._size, self._waited = size, 0.0
        if self._last_step < 0:
            self._last_step = before.step
            self._next = sys.maxsize if self.every == Every() else before.step + 1
        zeros = [0.0] * len(self.running_sums.totals)
        self._start = before.sums or zeros
        self._shown = Mark(before.samples, self._start, time.perf_counter(), 0.0)
        self._recorded = self._shown._replace(sums=before.recorded or zeros)

    def watch(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, and measure how long this rank waits for them."""
        iterator = iter(batches)
        with telling("loading the first batch"):
            batch = self._next_of(iterator)
        while batch is not None:
            yield batch
            batch = self._next_of(iterator)

    def _next_of(self, iterator: Iterator[T]) -> T | None:
        start = time.perf_counter()
        batch = next(iterator, None)
        self._waited += time.perf_counter() - start
        return batch

    def after_step(self, progress: Progress) -> None:
        """Take the sums after a step if it is one of those at which all ranks do. Collective; `progress` is after the step."""
        step = progress.step
        if self._taken and (self._taken.arrived is None or self._taken.arrived.query()):
            self.settle()
        if step < self._next:
            return
        self.settle()  # the step of the sums is long done
        self._take(progress)
        steps = self.every.steps
        self._next = min(step + self._ahead, step - step % steps + steps if steps else sys.maxsize)

    def _take(self, progress: Progress) -> None:
        """Add the sums of all ranks, and let the device copy them to the host."""
        device, now, steps = self.strategy.device, time.perf_counter(), progress.step - self._last_step
        # No more than twice as many as before: until the device's queue is full, steps seem to take no time.
        ahead = max(1, min(2 * steps, round(steps * self.period / max(now - self._last_time, 1e-6))))
        self._last_step, self._last_time = progress.step, now
        if self.every.steps:
            is_row = progress.step % self.every.steps == 0
        else:
            is_row = now - self._recorded_at >= (self.every.seconds or 0) - self.period / 2
        if is_row:
            self._recorded_at = now
        cuda, first, totals = device.type == "cuda", self.strategy.runtime.rank == 0, self.running_sums.totals
        host = torch.tensor([self._waited, first * ahead, first * is_row], dtype=totals.dtype, pin_memory=cuda)
        own = totals if self.strategy.is_metric_rank else torch.zeros_like(totals)
        norm = [] if self.running_sums.norm is None else [self.running_sums.norm * first]  # the same on every rank
        values = self.strategy.runtime.all_reduce(torch.cat([host.to(device, non_blocking=cuda), own, *norm]))
        arrived = torch.cuda.Event() if cuda else None
        values = values.to("cpu", non_blocking=cuda)
        if arrived:
            arrived.record()
        self._taken = Taken(values, arrived, replace(progress), now)

    def settle(self) -> None:
        """Record and show the sums that were taken last, if that was not done yet. It waits for them."""
        if self._taken is None:
            return
        taken, self._taken = self._taken, None
        if taken.arrived:
            taken.arrived.synchronize()
        waited, ahead, is_row, *values = taken.values.tolist()
        self._ahead = int(ahead)
        sums = [earlier + now for earlier, now in zip(self._start, values, strict=False)]
        norm = {"gradient_norm": values[-1]} if len(values) > len(sums) else {}
        mark = Mark(taken.progress.samples, sums, taken.time, waited / self.strategy.runtime.world_size)
        if is_row:
            self.logger.steps(self._row(taken, norm, self._recorded, mark))
            self._recorded = mark
        if taken.time - self._shown_at >= min(self.logger.show_every, self.every.seconds or math.inf) - self.period / 2:
            self.logger.show(self._row(taken, norm, self._shown, mark))
            self._shown, self._shown_at = mark, taken.time

    @property
    def recorded(self) -> list[float]:
        """The sums of the epoch at its last recorded row."""
        return self._recorded.sums

    def _row(self, taken: Taken, norm: dict[str, float], since: Mark, mark: Mark) -> dict[str, Any]:
        seconds = mark.time - since.time
        rate, left = (mark.samples - since.samples) / seconds, self._size - mark.samples
        at = taken.progress
        sums = [now - before for before, now in zip(since.sums, mark.sums, strict=True)]
        row: dict[str, Any] = {"epoch": at.epoch, "step": at.step, **means(self.strategy.task, sums), "lr": at.lr}
        row |= {"samples_per_second": rate, "data_wait": (mark.waited - since.waited) / seconds}
        row |= norm | ({"mfu": rate / self.settings.full_rate} if self.settings.full_rate else {})
        row |= {"peak_memory_MiB": peak_memory_bytes() / 2**20, "eta_epoch": left / rate}
        return row | {"eta": (left + (self.settings.epochs - at.epoch) * self._size) / rate}
