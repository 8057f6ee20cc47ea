"""The numbers with a unit of a run, on a clock of the test: seconds, rates, what is left, and MFU.

A step takes 2 s, of which its batch takes 0.5 s, and an evaluation 100 s. An epoch has five steps
of one sample, of which only the third epoch is the last.
"""

import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_lab.config.types import Every
from ddp_lab.data.batch import Batch
from ddp_lab.observe.logger import Logger
from ddp_lab.strategies.single import Single
from ddp_lab.tasks.base import Task
from ddp_lab.training import meter
from ddp_lab.training.hooks import Exchanges, Hook, Run
from ddp_lab.training.loop import fit
from ddp_lab.training.meter import Meter
from ddp_lab.training.metrics import RunningSums
from ddp_lab.training.plan import FitSettings, StepLimit
from ddp_lab.training.progress import Progress
from ddp_lab.training.sync import Sync
from ddp_lab.world.runtime import Runtime

# seconds
WAIT = 0.5
STEP = 2.0  # the wait for its batch included
EVALUATION = 100.0
SAMPLES = 5
EPOCHS = 3
RATE = 1 / STEP  # samples per second
FULL_RATE = 2.0  # samples per second of a device at its peak
PEAK = 3 * 2**20  # bytes
BATCH = Batch(torch.ones(1, 1), torch.zeros(1), 1)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


class Loading:
    """Five batches, each of which takes WAIT."""

    batch_size = 1
    data = SimpleNamespace(size=SAMPLES, is_endless=False)
    inputs, targets = BATCH[:2]

    def __init__(self, clock: Clock):
        self.clock = clock
        self.start = 0

    def __len__(self):
        return SAMPLES

    def set_epoch(self, order: int, samples: int) -> None:
        self.start = samples

    def begin_at(self, stream: object) -> None:
        """Do nothing: it is no stream."""

    def stream_position(self, runtime: Runtime) -> dict[str, object]:
        return {}

    def __iter__(self):
        for _ in range(self.start, SAMPLES):
            self.clock.now += WAIT
            yield BATCH


class Evaluating(Loading):
    """One batch, which takes EVALUATION."""

    def __iter__(self):
        self.clock.now += EVALUATION
        yield BATCH


class Working:
    """A step that takes the rest of STEP."""

    def __init__(self, clock: Clock, sums: RunningSums):
        self.clock = clock
        self.sums = sums

    def batches(self, loader):
        return loader

    def __call__(self, batch) -> None:
        self.clock.now += STEP - WAIT
        self.sums.add(torch.ones(2, dtype=torch.float64))


class Rows(Logger):
    show_every = 0.0

    def __init__(self):
        self.of_evaluations = []
        self.of_steps = []
        self.shown = []
        self.of_epochs = []

    def evaluation(self, epoch, step, **metrics):
        self.of_evaluations.append((epoch, step))

    def steps(self, row):
        self.of_steps.append(row)

    def show(self, row):
        self.shown.append(row)

    def epoch(self, epoch, **metrics):
        self.of_epochs.append(metrics)


class Positions(Hook):
    """Keeps the position after each step, as a checkpoint would."""

    def __init__(self):
        self.positions = []

    def on_start(self, run):
        self.run = run

    def on_step_end(self, position):
        self.positions.append(self.run.current())


@pytest.fixture
def run(monkeypatch):
    """Return a function that trains from a position and returns rows and positions."""

    def train(
        progress: Progress,
        log_every: Every | None = None,
        hook: Hook | None = None,
        **limits: Any,
    ) -> Rows:
        clock = Clock()
        monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
        monkeypatch.setattr(meter, "peak_memory_bytes", lambda: PEAK)
        strategy = Single(Runtime("cpu"))
        strategy.task = Task(lambda outputs, targets: outputs[:, 0])
        strategy.setup(torch.nn.Identity())
        sums = RunningSums(strategy.task, strategy.device)
        rows = Rows()
        eager = SimpleNamespace(strategy=strategy, ema=None, running_sums=sums, lr=0.25)
        every = log_every or Every(steps=2)
        settings = FitSettings(EPOCHS, log_every=every, full_rate=FULL_RATE, **limits)
        loaders = {"train": Loading(clock), "val": Evaluating(clock)}
        step = Working(clock, sums)
        measured = Meter(strategy.task, settings, rows)
        sync = Sync(strategy, sums, settings.log_every, read=measured.read)
        hooks = [Exchanges(), measured, *([hook] if hook else [])]
        fit(Run(eager, step, loaders, settings, rows, hooks, sync, progress))
        return rows

    return train


def test_seconds_and_rate_of_an_epoch_are_those_of_its_steps_without_the_evaluation(run):
    rows = run(Progress()).of_epochs
    assert [row["seconds"] for row in rows] == [SAMPLES * STEP] * EPOCHS
    assert [row["samples_per_second"] for row in rows] == [RATE] * EPOCHS
    assert [row["step"] for row in rows] == [5, 10, 15]


def test_evaluations_within_an_epoch_count_neither_in_its_seconds_nor_in_the_rates(run):
    """After each step but the last of an epoch, 100 s of which none is a step's."""
    rows = run(Progress(), evaluate_every=1)
    places = [(1 + step // SAMPLES, step) for step in range(1, EPOCHS * SAMPLES) if step % SAMPLES]
    assert rows.of_evaluations == places
    assert [row["seconds"] for row in rows.of_epochs] == [SAMPLES * STEP] * EPOCHS
    assert [row["samples_per_second"] for row in rows.of_epochs] == [RATE] * EPOCHS
    assert rows.of_steps
    assert [row["samples_per_second"] for row in rows.of_steps] == [RATE] * len(rows.of_steps)
    assert [row["data_wait"] for row in rows.of_steps] == [WAIT / STEP] * len(rows.of_steps)


def test_seconds_and_rate_of_a_resumed_epoch_have_the_time_before(run):
    """Three steps before took 12 s, twice as long as the others: 12 + 2 * 2 s for five samples."""
    rows = run(Progress(samples=3, step=3, sums=[3.0, 3.0], seconds=12.0)).of_epochs
    assert rows[0]["seconds"] == 12 + 2 * STEP
    assert rows[0]["samples_per_second"] == 5 / 16
    assert rows[1]["seconds"] == 5 * STEP, "the next epoch has the time of the resumed one"


def test_position_after_a_step_has_the_seconds_of_the_epoch_so_far(run):
    hook = Positions()
    run(Progress(epoch=EPOCHS, samples=3, step=13, sums=[3.0, 3.0], seconds=12.0), hook=hook)
    assert [position.seconds for position in hook.positions] == [14.0, 16.0]
    assert [position.sums for position in hook.positions] == [[4.0, 4.0], [5.0, 5.0]]


def test_rows_of_steps_have_the_rate_and_the_time_that_is_left(run):
    rows = run(Progress()).of_steps
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12, 14]
    left_of_epoch = [3, 1, 4, 2, 0, 3, 1]  # samples
    epochs_after = [2, 2, 1, 1, 1, 0, 0]
    assert [row["epoch"] for row in rows] == [1, 1, 2, 2, 2, 3, 3]
    for row, left, epochs in zip(rows, left_of_epoch, epochs_after, strict=True):
        assert row["samples_per_second"] == pytest.approx(RATE)
        assert row["eta_epoch"] == pytest.approx(left * STEP)
        assert row["eta"] == pytest.approx((left + epochs * SAMPLES) * STEP)
        assert row["data_wait"] == pytest.approx(WAIT / STEP)
        assert row["mfu"] == pytest.approx(RATE / FULL_RATE)
        assert row["peak_memory_MiB"] == 3
        assert row["lr"] == 0.25


def test_time_that_is_left_ends_at_the_limit_that_is_reached_first(run):
    """Eleven steps: after step 2 nine are left, which take 18 s, and after step 10 one."""
    rows = run(Progress(), limits=(StepLimit("max_steps", 11, 11),)).of_steps
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10]
    assert [row["eta"] for row in rows] == pytest.approx([18, 14, 10, 6, 2])
    # of the epoch, which max_steps does not shorten before its last one
    assert [row["eta_epoch"] for row in rows] == pytest.approx([6, 2, 8, 4, 0])


def test_time_that_is_left_ends_with_max_minutes_of_training(run):
    """0.3 minutes are 18 s, of which evaluations take none: nine steps of 2 s.

    The guard would end the run then; here nobody does.
    """
    rows = run(Progress(), max_minutes=0.3).of_steps
    assert [row["step"] for row in rows[:4]] == [2, 4, 6, 8]
    assert [row["eta"] for row in rows[:4]] == pytest.approx([14, 10, 6, 2])
    # a launch before has trained for 10 s, 4 s of which were in this epoch
    resumed = Progress(samples=2, step=2, sums=[2.0, 2.0], seconds=4.0, trained=6.0)
    rows = run(resumed, max_minutes=0.3).of_steps
    assert [row["step"] for row in rows[:2]] == [4, 6]
    assert [row["eta"] for row in rows[:2]] == pytest.approx([4, 0])


def test_rows_every_so_many_seconds_come_then(run):
    """Steps end after 2, 4, 6, 8 and 10 s of an epoch; the row of 4 s is the first that is due."""
    rows = run(replace(Progress(epoch=EPOCHS), step=10), Every(seconds=4.0)).of_steps
    assert [row["step"] for row in rows] == [12, 14]


def test_what_is_shown_counts_from_what_was_shown_before(run):
    rows = run(Progress(epoch=EPOCHS, step=10)).shown
    assert len(rows) > 1
    assert {row["samples_per_second"] for row in rows} == {RATE}
    assert all(math.isclose(row["eta"], row["eta_epoch"]) for row in rows), "no epoch follows"


def test_exchange_in_an_evaluation_leaves_the_rows_of_the_steps_after_it():
    """It counts batches of the evaluation as steps, so that it is due in a long one."""
    strategy = Single(Runtime("cpu"))
    strategy.task = Task(lambda outputs, targets: outputs[:, 0])
    strategy.setup(torch.nn.Identity())
    sync = Sync(strategy, RunningSums(strategy.task, strategy.device), Every(steps=1))
    position = Progress(step=18)
    sync.begin(position)
    sync.begin_epoch(position)
    sync.exchange(18 + 5, position)
    assert sync.next == 19
