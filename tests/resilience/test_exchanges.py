"""How many steps lie between two exchanges: half a second of them, at most the kept losses."""

import time
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from ddp_lab.config.types import Every
from ddp_lab.resilience.guard import Guard
from ddp_lab.strategies.single import Single
from ddp_lab.tasks.base import Task
from ddp_lab.training.metrics import LONGEST, RunningSums
from ddp_lab.training.progress import Progress
from ddp_lab.training.sync import PERIOD, Sync
from ddp_lab.world.runtime import Runtime


def begun(
    step: int, flags: Any = lambda: (), every: Every | None = None
) -> tuple[Sync, RunningSums]:
    """Return exchanges that begin after a step, and the sums of the next ones."""
    strategy = Single(Runtime("cpu"))
    strategy.task = Task()
    strategy.setup(nn.Identity())
    sums = RunningSums(strategy.task, torch.device("cpu"))
    sync = Sync(strategy, sums, every or Every(), flags)
    sync.begin(Progress(step=step))
    sync.begin_epoch(Progress(step=step))
    return sync, sums


def next_exchange(monkeypatch, seconds_per_step: float, steps: int) -> int:
    """Return how many steps after an exchange the next one is after `steps` steps this long."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    sync, _ = begun(0)
    now[0] += steps * seconds_per_step
    sync.exchange(steps, Progress(step=steps))
    return sync.next - steps


@pytest.mark.parametrize(
    ("seconds_per_step", "expected"),
    [(0.01, 50), (0.1, 5), (3.0, 1), (0.00001, LONGEST)],  # 0.5 s / 0.01 s; at most LONGEST
)
def test_exchanges_lie_half_a_second_apart_and_no_loss_is_overwritten(
    monkeypatch, seconds_per_step, expected
):
    assert PERIOD == 0.5
    assert next_exchange(monkeypatch, seconds_per_step, 40) == expected


def test_first_of_the_most_steps_between_two_exchanges_is_found():
    """Its loss is in the place that the next step would overwrite."""
    sync, sums = begun(7)
    for step in range(LONGEST):
        sums.add(torch.tensor([float("nan") if step == 0 else 1.0, 1.0], dtype=torch.float64))
    step = 7 + LONGEST
    assert sync.exchange(step, Progress(step=step)).not_finite == (8, 0)


def test_loss_that_is_not_finite_has_its_step_in_an_evaluation_too():
    sync, sums = begun(7)
    for loss in (1.0, float("nan"), 1.0):
        sums.add(torch.tensor([loss, 1.0], dtype=torch.float64))
    batches = 500
    assert sync.exchange(10 + batches, Progress(step=10)).not_finite == (9, 0)


@pytest.mark.parametrize("best", ["val_loss", None])
def test_exchanges_after_an_evaluation_count_from_the_last_step(best):
    """Whether the evaluation is the best one, of which a checkpoint is written, or not."""
    sync, _ = begun(20, flags=lambda: (False,) * 5)
    checkpoints = MagicMock(best=best, problem=None)
    checkpoints.state.strategy.module.state_dict = dict
    guard = Guard(
        *cast("Any", (checkpoints, None, MagicMock())),
        *cast("Any", (1, None, None, "stop", "stop", None, ())),
    )
    loader = SimpleNamespace(data=SimpleNamespace(size=8))
    position = Progress(step=20, best={"val_loss": 0.5}, best_steps={"val_loss": 20})
    run = SimpleNamespace(
        sync=sync,
        position=position,
        loaders={"train": loader},
        current=lambda: position,
        written=[],
    )
    guard.on_start(cast("Any", run))
    for number in range(1, 500):
        guard.on_evaluation_batch(position, number)
    guard.on_evaluated(position, {}, 1.0)
    assert sync.is_due(21)


def test_training_without_rows_and_flags_exchanges_nothing():
    sync, _ = begun(0, flags=None)
    assert sync.next > 10**9


class NeverArriving:
    """A copy to the host that takes long on this rank."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


def test_rank_that_waits_for_the_sums_of_a_row_exchanges_at_the_same_steps_as_others():
    sync, _ = begun(0, every=Every(steps=2))
    sync._exchange_at = 7  # as rank 0 has said
    sync.after_step(Progress(step=2), 0.0)
    assert sync._pending is not None
    sync._pending = sync._pending._replace(arrived=cast("Any", NeverArriving()))
    assert sync.after_step(Progress(step=3), 0.0) is None
    assert sync.next == 4, "it looks again after the next step"
    assert not sync.is_due(4)
    sync.flush()
    assert [sync.is_due(step) for step in (6, 7)] == [False, True]


def test_evaluation_exchanges_only_where_it_is_due_on_all_ranks():
    sync = SimpleNamespace(next=1, is_due=lambda number: False)  # without the method `exchange`
    heartbeat = SimpleNamespace(at=lambda *place: None)
    guard = Guard(*cast("Any", (None, None, heartbeat)), 1, None, None, "stop", "stop", None, ())
    loader = SimpleNamespace(data=SimpleNamespace(size=8))
    guard.on_start(
        cast("Any", SimpleNamespace(sync=sync, position=Progress(), loaders={"train": loader}))
    )
    guard.on_evaluation_batch(Progress(step=1), 1)
