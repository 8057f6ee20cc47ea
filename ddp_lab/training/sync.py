"""What the ranks exchange between steps: one clock, and one small all_reduce.

Each rank has a part of what concerns all: its sums of the losses, a loss that is not finite, a
signal that it has received, the time that its work has taken. About twice a second, after the same
step on every rank, one all_reduce adds these parts, and every rank then acts on the same result.
The ranks wait for it and for their devices, so it does not run after every step: clocks differ
between ranks, and rank 0 says in each exchange how many steps lie before the next one. Between
these exchanges only rows that are due every N steps need another one; their sums are copied to the
host while the next steps run, and no rank waits for them.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from ddp_lab.config.types import Every
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.metrics import LONGEST, RunningSums
from ddp_lab.training.progress import Progress

PERIOD = 0.5  # approximate seconds between two exchanges


class Exchanged(NamedTuple):
    """The result of an exchange, the same on every rank.

    Attributes:
        position: after the step of the exchange, as hooks get it.
        time: on this rank, as time.perf_counter counts it.
        sums: [loss_sum, *task.train_metrics, weight] of the epoch so far.
        gradient_norm: of the step; None if it does not compute one.
        waited: seconds in which a rank has waited for batches in this epoch, on average over the
            ranks.
        is_row: whether the steps since the last row are a row of metrics.jsonl.
        flags: whether a flag is set on any rank, in the order of `Sync.flags`.
        not_finite: (step, rank) of the first loss since the last exchange that is not finite; None
            if all are finite.
        weights_not_finite: whether any of the given weights is not finite.
        work: of all ranks, as from `RankWork.own_work`; empty if it is not exchanged.
    """

    position: Progress
    time: float
    sums: list[float]
    gradient_norm: float | None
    waited: float
    is_row: bool
    flags: tuple[bool, ...]
    not_finite: tuple[int, int] | None
    weights_not_finite: bool
    work: list[float]


class RankWork(Protocol):
    """What compares how long the ranks work."""

    def own_work(self) -> list[float]:
        """Return this rank's values since the last call, among zeros in the places of others."""
        ...

    def read(self, exchanged: Exchanged) -> None:
        """Take the values of all ranks, `Exchanged.work`."""


class Added(NamedTuple):
    """The values of all ranks, added, in the order of the tensor in which they are sent.

    Attributes:
        waited: seconds in which the ranks have waited for batches.
        ahead: number of steps before the next exchange, of rank 0; 0 if the ranks do not wait.
        is_row: whether the steps are a row, by the clock of rank 0.
        flags: how many ranks have set each flag.
        work: as in `Exchanged`.
        number_of_bad: how many ranks have a loss that is not finite.
        bad_weights: how many ranks have a weight that is not finite.
        sums: of the steps since the beginning of the epoch, or of this launch in it.
        gradient_norm: of the step; None if it does not compute one.
    """

    waited: float
    ahead: int
    is_row: bool
    flags: list[float]
    work: list[float]
    number_of_bad: float
    bad_weights: float
    sums: list[float]
    gradient_norm: float | None

    @classmethod
    def of(cls, values: list[float], flags: int, work: int, sums: int) -> "Added":
        """Return the values of a tensor.

        Args:
            values: of the tensor.
            flags, work, sums: how many of them are flags, work and sums.
        """
        waited, ahead, is_row, *rest = values
        after_flags = rest[flags:]
        number_of_bad, bad_weights, *on_device = after_flags[work:]
        return cls(
            waited=waited,
            ahead=int(ahead),
            is_row=bool(is_row),
            flags=rest[:flags],
            work=after_flags[:work],
            number_of_bad=number_of_bad,
            bad_weights=bad_weights,
            sums=on_device[:sums],
            gradient_norm=on_device[sums] if len(on_device) > sums else None,
        )


class PendingReduce(NamedTuple):
    """The values of an exchange, and what this rank remembers for it.

    Attributes:
        values: on the host once `arrived` has happened; on the device if the ranks wait for them.
        arrived: None on a CPU, and if the ranks wait.
        first_bad: step of this rank's first loss that is not finite, [] on the device; inf if there
            is none. None: not wanted.
        number_of_work: how many values are those of `RankWork`.
        position, time: as in `Exchanged`.
    """

    values: torch.Tensor
    arrived: torch.cuda.Event | None
    first_bad: torch.Tensor | None
    number_of_work: int
    position: Progress
    time: float


class Sync:
    """The exchanges of a training. All ranks call its methods at the same steps.

    Args:
        strategy: whose ranks exchange.
        running_sums: of the steps.
        every: when a row of metrics.jsonl is due; Every(): never.
        flags: returns what this rank has to say, for example whether it was asked to stop. None:
            nothing is ever decided.
        read: gets the results after steps, in order, from which rows are made.
        work: compares the ranks, in the exchanges for which they wait; None: they are not compared.

    Attributes:
        next: the first step after which `after_step` has something to do; while a rank waits for
            the sums of a row, another one than on other ranks.
        recorded: the sums of the epoch at its last row.
    """

    def __init__(
        self,
        strategy: Strategy,
        running_sums: RunningSums,
        every: Every,
        flags: Callable[[], Sequence[bool]] | None = None,
        read: Callable[[Exchanged], None] | None = None,
        work: RankWork | None = None,
    ):
        self.strategy = strategy
        self.running_sums = running_sums
        self.every = every
        self.flags = flags or (lambda: ())
        self.read = read or (lambda exchanged: None)
        self.work = work
        self.period = min(PERIOD, every.seconds or PERIOD)
        self.next = sys.maxsize
        self.recorded: list[float] = []
        self._is_used = flags is not None or every != Every()
        self._pending: PendingReduce | None = None

    def begin(self, position: Progress) -> None:
        """Begin before the first step of this launch, at `position`."""
        self.running_sums.begin(position.step)
        self._last_step = position.step
        self._last_time = time.perf_counter()
        self._recorded_at = self._last_time
        self._exchange_at = position.step + 1 if self._is_used else sys.maxsize
        self._set_next(position.step)

    def begin_epoch(self, position: Progress) -> None:
        """Begin with the remaining steps of an epoch, at `position`. `Run.waited` is then 0."""
        zeros = [0.0] * len(self.running_sums.totals)
        self._sums_before = position.sums or zeros
        self.recorded = position.recorded or zeros

    def is_due(self, step: int) -> bool:
        """Return whether the ranks exchange after a step, the same on every rank."""
        return step >= self._exchange_at

    def after_step(self, position: Progress, waited: float) -> Exchanged | None:
        """Exchange what is due after a step that is at least `next`. Collective.

        Args:
            position: as hooks get it.
            waited: seconds in which this rank has waited for the batches of this epoch.

        Returns:
            What the ranks have exchanged now, on which all of them may act; None if that is not
            due.
        """
        step = position.step
        if self._pending and (self._pending.arrived is None or self._pending.arrived.query()):
            self.flush()
        exchanged = None
        if self.is_due(step):
            self.flush()
            is_row = self._is_row(step)
            exchanged = self._receive(self._send(step, position, waited, is_row, waits=True))
            self._hand_on(exchanged)
        elif self._is_row_step(step):
            self.flush()  # of the last row, whose step is long done
            self._pending = self._send(step, position, waited, is_row=True, waits=False)
        self._set_next(step)
        return exchanged

    def exchange(
        self, step: int, position: Progress, weights: Iterable[torch.Tensor] = ()
    ) -> Exchanged:
        """Exchange now, before something that all ranks must agree on.

        Collective; waits for the device.

        Args:
            step: number of the last step, which in an evaluation counts batches, too. `is_due`
                takes the same number.
            position: as in `Exchanged`, whose step is the last one of training.
            weights: the tensors of this rank to check for values that are not finite.
        """
        exchanged = self._receive(
            self._send(step, position, 0.0, is_row=False, waits=True, weights=weights)
        )
        self._set_next(position.step)  # and not `step`: batches of an evaluation have no rows
        return exchanged

    def flush(self) -> None:
        """Hand on the sums of the last row, if that was not done yet. It waits for them."""
        if self._pending is not None:
            sent = self._pending
            self._pending = None
            self._hand_on(self._receive(sent))

    def _hand_on(self, exchanged: Exchanged) -> None:
        self.read(exchanged)
        if exchanged.is_row:
            self.recorded = exchanged.sums

    def _is_row_step(self, step: int) -> bool:
        return bool(self.every.steps) and step % self.every.steps == 0

    def _is_row(self, step: int) -> bool:
        """Return whether a row is due by this rank's clock; that of rank 0 counts."""
        if self.every.seconds is None:
            return self._is_row_step(step)
        return time.perf_counter() - self._recorded_at >= self.every.seconds - self.period / 2

    def _set_next(self, step: int) -> None:
        """Set `next` to the first step after `step` at which there is something to do."""
        self.next = self._exchange_at
        if self.every.steps:
            self.next = min(self.next, step - step % self.every.steps + self.every.steps)
        if self._pending is not None:
            self.next = step + 1

    def _send(
        self,
        step: int,
        position: Progress,
        waited: float,
        is_row: bool,
        waits: bool,
        weights: Iterable[torch.Tensor] = (),
    ) -> PendingReduce:
        """Add the values of all ranks: in the order of `Added`."""
        runtime = self.strategy.runtime
        device = self.strategy.device
        totals = self.running_sums.totals
        is_main = runtime.is_main
        cuda = device.type == "cuda"
        now = time.perf_counter()
        if is_row:
            self._recorded_at = now

        # without a wait, steps seem to take no time until the device's queue is full
        ahead = self._steps_ahead(step, now) if waits else 0
        work = self.work.own_work() if self.work is not None and waits else []
        of_host = [
            waited,
            float(is_main * ahead),
            float(is_main and is_row),
            *map(float, self.flags()),
            *work,
        ]
        on_host = torch.tensor(of_host, dtype=totals.dtype, pin_memory=cuda)

        first_bad = self.running_sums.first_bad(position.step) if waits else None
        is_bad = totals.new_zeros(()) if first_bad is None else first_bad.isfinite().to(totals)
        bad_weights = [1.0 - tensor.isfinite().all().to(totals) for tensor in weights]
        worst_weight = torch.stack(bad_weights).max() if bad_weights else torch.zeros_like(is_bad)
        own_totals = totals if self.strategy.is_metric_rank else torch.zeros_like(totals)
        parts = [
            on_host.to(device, non_blocking=cuda),
            torch.stack([is_bad, worst_weight]),
            own_totals,
        ]
        if self.running_sums.norm is not None:  # the same on every rank
            parts.append(self.running_sums.norm * is_main)

        values = runtime.all_reduce(torch.cat(parts))
        arrived = None
        if waits and cuda:
            # in a file of torch, by which the watchdog recognises a rank that waits
            torch.cuda.synchronize(device)
        elif cuda:
            arrived = torch.cuda.Event()
            values = values.to("cpu", non_blocking=True)
            arrived.record()
        return PendingReduce(
            values=values,
            arrived=arrived,
            first_bad=first_bad,
            number_of_work=len(work),
            position=replace(position),
            time=now,
        )

    def _steps_ahead(self, step: int, now: float) -> int:
        """Return how many steps after this one the ranks exchange again, by this rank's clock.

        After an evaluation, whose batches were counted as steps, it is the next one.
        """
        elapsed = max(now - self._last_time, 1e-6)
        steps = (step - self._last_step) * self.period / elapsed
        self._last_step = step
        self._last_time = now
        return min(LONGEST, max(1, round(steps)))

    def _receive(self, sent: PendingReduce) -> Exchanged:
        """Return what the ranks have sent.

        Collective if a loss is not finite, which `_send` has made known to all.
        """
        if sent.arrived is not None:
            sent.arrived.synchronize()
        added = Added.of(
            sent.values.tolist(),
            flags=len(self.flags()),
            work=sent.number_of_work,
            sums=len(self._sums_before),
        )
        if added.ahead:
            self._exchange_at = self._last_step + added.ahead

        not_finite = None
        if added.number_of_bad and sent.first_bad is not None:
            not_finite = self._find_first(sent.first_bad)
        exchanged = Exchanged(
            position=sent.position,
            time=sent.time,
            sums=[before + now for before, now in zip(self._sums_before, added.sums, strict=True)],
            gradient_norm=added.gradient_norm,
            waited=added.waited / self.strategy.runtime.world_size,
            is_row=added.is_row,
            flags=tuple(bool(count) for count in added.flags),
            not_finite=not_finite,
            weights_not_finite=bool(added.bad_weights),
            work=added.work,
        )
        if self.work is not None and added.work:
            self.work.read(exchanged)
        return exchanged

    def _find_first(self, first_bad: torch.Tensor) -> tuple[int, int]:
        """Return the first step of all ranks whose loss is not finite, and the first rank with it.

        Collective.

        Step and rank are encoded in one negative number, of which MAX finds the earliest.
        """
        runtime = self.strategy.runtime
        encoded = -(first_bad * runtime.world_size + runtime.rank)
        earliest = runtime.all_reduce(encoded, dist.ReduceOp.MAX).item()
        assert earliest != -math.inf, "a rank has said that a loss is not finite"
        step, rank = divmod(int(-earliest), runtime.world_size)
        return step, rank
