"""Ranks that are slower than the others for a minute: which, by which part, and for how long.

All ranks exchange how long they have waited for their batches (data) and, under strategies whose
ranks have the same work, how long they have computed (strategies/work_time.py). They do it in the
exchanges of sync.py, so that it costs no further collective.

Rank 0 compares the ranks in periods of a sixth of `straggler.seconds`. A rank is slow in a period
if one of these holds, with `straggler.slower` = 0.2:

    data + compute > 1.2 * the median of the ranks
    its wait for data makes the step longer by 20 %: step > 1.2 * (step - (data - median of data))

The second one holds for ranks of any work. A rank that is slow in all periods of `seconds` is
named, and again if it was not slow in any period for as long. One slow period, such as that of a
checkpoint, begins the count anew.
"""

import math
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ddp_lab.observe.log import log
from ddp_lab.observe.logger import Logger
from ddp_lab.training.hooks import Hook, Run
from ddp_lab.training.metrics import Evaluation
from ddp_lab.training.progress import Progress
from ddp_lab.training.sync import Exchanged

PERIODS = 6  # in the time after which a rank is named
REMEDIES = {
    "data": "Look at the disk and the CPUs of its machine, or read its samples with more processes "
    "(data.num_workers)",
    "compute": "Look for other programs on its device and CPUs, and for a lower clock or a higher "
    "temperature (nvidia-smi)",
}


class Work(NamedTuple):
    """What the ranks have done in some steps.

    Attributes:
        seconds: that the steps took, by the clock of rank 0.
        steps: their number.
        data: seconds in which each rank waited for batches, in order of rank.
        compute: seconds in which each rank computed; 0 if they are not known.
    """

    seconds: float
    steps: int
    data: Sequence[float]
    compute: Sequence[float]

    def plus(self, other: "Work") -> "Work":
        """Return the work of these steps and of the next ones."""
        return Work(
            self.seconds + other.seconds,
            self.steps + other.steps,
            [before + now for before, now in zip(self.data, other.data, strict=True)],
            # without one part of the steps, the sum would not be that of all of them
            [
                before + now if before and now else 0.0
                for before, now in zip(self.compute, other.compute, strict=True)
            ],
        )


class Lag(NamedTuple):
    """By how much a rank is slower than the others.

    Attributes:
        rank: its number.
        part: that explains the most of it.
        slower: fraction by which it is slower.
        milliseconds: of the part in a step of this rank.
        usual: the same of the median rank.
    """

    rank: int
    part: Literal["data", "compute"]
    slower: float
    milliseconds: float
    usual: float


def lag_of(rank: int, work: Work) -> Lag:
    """Return by how much a rank is slower than the others; negative if it is faster.

    The median of an even number of ranks is the lower one of the middle two. So the slower one of
    two ranks is compared with the faster one.
    """
    usual_data = statistics.median_low(work.data)
    more_data = work.data[rank] - usual_data
    slower = more_data / max(work.seconds - more_data, 1e-9)
    more_compute = -math.inf
    usual_compute = 0.0
    if all(work.compute):
        usual_compute = statistics.median_low(work.compute)
        more_compute = work.compute[rank] - usual_compute
        busy = [data + compute for data, compute in zip(work.data, work.compute, strict=True)]
        slower = max(slower, busy[rank] / statistics.median_low(busy) - 1)

    per_step = 1000 / work.steps
    if more_compute > more_data:
        milliseconds = work.compute[rank] * per_step
        return Lag(rank, "compute", slower, milliseconds, usual_compute * per_step)
    milliseconds = work.data[rank] * per_step
    return Lag(rank, "data", slower, milliseconds, usual_data * per_step)


class Detector:
    """Finds ranks that are slower than the others for some time, and those that no longer are.

    Args:
        slower: fraction of the median by which a rank must be slower.
        seconds: for which it must be so.

    Attributes:
        named: the ranks that are slow, with what was found when each was named.
    """

    def __init__(self, slower: float, seconds: float):
        self.slower = slower
        self.seconds = seconds
        self.named: dict[int, Lag] = {}
        self._period: Work | None = None
        # the work since a rank is slow and not named, or named and not slow
        self._changed: dict[int, Work] = {}

    def add(self, work: Work) -> list[Lag]:
        """Take what the ranks have done in the next steps; return the ranks that are named now.

        A rank that has recovered is returned, too, and is not in `named` any more.
        """
        self._period = work if self._period is None else self._period.plus(work)
        if self._period.seconds < self.seconds / PERIODS:
            return []
        period = self._period
        self._period = None
        return [lag for rank in range(len(work.data)) if (lag := self._judge(rank, period))]

    def _judge(self, rank: int, period: Work) -> Lag | None:
        """Return a rank's lag if it has been slow, or not slow any more, for long enough now."""
        is_slow = lag_of(rank, period).slower > self.slower
        if is_slow == (rank in self.named):
            self._changed.pop(rank, None)
            return None
        before = self._changed.get(rank)
        changed = period if before is None else before.plus(period)
        self._changed[rank] = changed
        if changed.seconds < self.seconds:
            return None

        del self._changed[rank]
        lag = lag_of(rank, changed)
        if is_slow:
            self.named[rank] = lag
        else:
            del self.named[rank]
        return lag


class Stragglers(Hook):
    """Exchanges how long the ranks have worked, and names those that are slow.

    Args:
        detector: decides, on rank 0.
        logger: gets a row for each rank that is named or has recovered.
        note: gets what is known of the ranks that are slow, after each change.
    """

    def __init__(
        self,
        detector: Detector,
        logger: Logger,
        note: Callable[[Progress, list[dict[str, Any]]], None],
    ):
        self.detector = detector
        self.logger = logger
        self.note = note
        self._named: dict[int, dict[str, Any]] = {}

    def on_start(self, run: Run) -> None:
        self.run = run
        runtime = run.strategy.runtime
        self._timer = run.strategy.timer
        self._rank = runtime.rank
        self._ranks = runtime.world_size
        device = "" if runtime.device.type == "cpu" else f" {runtime.device}"
        where = f"{socket.gethostname()}{device}"
        self._places = runtime.gather_objects("places of the ranks", where) or []
        if self._timer is not None:
            self._timer.take(0)  # forget the warm-up
        self._sent_step = run.position.step
        self._read_step = run.position.step
        self._waited = 0.0
        self._time = time.perf_counter()

    def on_epoch_end(self, position: Progress) -> None:
        self._waited = 0.0  # as `Run.waited`
        self._time = time.perf_counter()

    def on_evaluated(
        self, position: Progress, results: Mapping[str, Evaluation], seconds: float
    ) -> None:
        # not later than now: an exchange within the evaluation has set the time, too
        self._time = min(self._time + seconds, time.perf_counter())

    def own_work(self) -> list[float]:
        """Return this rank's data and compute since the last call, in its places among all ranks.

        The sum over the ranks has the values of all. Without a step since then all are 0.
        """
        values = [0.0] * (2 * self._ranks)
        steps = self.run.position.step - self._sent_step
        if not steps:
            return values
        self._sent_step = self.run.position.step
        values[2 * self._rank] = self.run.waited - self._waited
        self._waited = self.run.waited
        if self._timer is not None:
            values[2 * self._rank + 1] = self._timer.take(steps)
        return values

    def read(self, exchanged: Exchanged) -> None:
        """Compare the ranks by what they have exchanged."""
        position = exchanged.position
        steps = position.step - self._read_step
        if not steps or not self._places:
            return
        seconds = exchanged.time - self._time
        self._read_step = position.step
        self._time = exchanged.time
        work = Work(seconds, steps, exchanged.work[::2], exchanged.work[1::2])
        for lag in self.detector.add(work):
            self._report(lag, position)

    def _report(self, lag: Lag, position: Progress) -> None:
        """Name a rank, or report that it has recovered, in the log, metrics.jsonl and status.json.

        Args:
            lag: of the rank.
            position: after the last step.
        """
        is_slow = lag.rank in self.detector.named
        place = self._places[lag.rank]
        seconds = self.detector.seconds
        # the part by which it was named
        part = lag.part if is_slow else self._named.pop(lag.rank)["part"]
        row = {
            "epoch": position.epoch,
            "step": position.step,
            "rank": lag.rank,
            "part": part,
            "state": "slow" if is_slow else "recovered",
            "slower": lag.slower,
            "place": place,
        }
        self.logger.straggler(row)
        if is_slow:
            self._named[lag.rank] = row
            log.warning(
                f"straggler: rank {lag.rank} ({place}) has been {lag.slower:.0%} slower than the "
                f"median of the ranks for {seconds:g} s, up to step {position.step}: {part} takes "
                f"{lag.milliseconds:.1f} ms of its step, and {lag.usual:.1f} ms on the median "
                f"rank. {REMEDIES[part]}"
            )
        else:
            log.info(
                f"straggler: rank {lag.rank} ({place}) has recovered: for {seconds:g} s, up to "
                f"step {position.step}, it was not slower than the others ({part} before)"
            )
        self.note(position, [*self._named.values()])
