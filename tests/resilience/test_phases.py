"""The phases in a heartbeat, which a message about a hang names: what a rank does, and where."""

import math
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from ddp_lab.resilience.guard import Guard
from ddp_lab.training.progress import Progress

# three steps an epoch
SIZE = 20
BATCH = 8


class Phases:
    """A heartbeat that keeps its phases. A phase without an epoch and a step keeps those before."""

    def __init__(self):
        self.phases_begun: list[tuple[str, int, int]] = []
        self.epoch = 0
        self.step = 0

    def at(self, doing: str, epoch: int | None = None, step: int | None = None) -> None:
        if epoch is not None:
            self.epoch = epoch
        if step is not None:
            self.step = step
        self.phases_begun.append((doing, self.epoch, self.step))


def make_guard(phases: Phases) -> Guard:
    """Return a guard that saves after no epoch but the last, and decides to go on."""
    return Guard(
        checkpoints=MagicMock(best=None),
        requests=MagicMock(),
        heartbeat=phases,
        every_epochs=100,
        every_steps=None,
        every_minutes=None,
        on_error="stop",
        on_nan="stop",
        check_replicas=None,
        at_steps=(),
    )


def test_phase_names_the_epoch_and_the_step_that_comes_next():
    phases = Phases()
    guard = make_guard(phases)
    guard._decide = lambda step, position, weights=(): False
    sync = SimpleNamespace(next=10**9, is_due=lambda step: False)
    position = Progress(epoch=2, step=3)
    loaders = {"train": SimpleNamespace(data=SimpleNamespace(size=SIZE))}
    run = SimpleNamespace(sync=sync, position=position, loaders=loaders, ends_after=math.inf)
    guard.on_start(run)
    for samples in (8, 16, 20):
        guard.before_step(None)
        position.step += 1
        position.samples = samples
        guard.on_step_end(position)
    guard.on_evaluation_batch(position, 1)
    steps = [(doing, 2, step) for step in (4, 5, 6) for doing in ("loading", "training")]
    assert phases.phases_begun == [*steps, ("evaluating", 2, 7), ("evaluating", 2, 7)]


@pytest.mark.parametrize(("evaluated", "decisions"), [({}, []), ({"val": None}, [3])])
def test_ranks_decide_again_after_an_epoch_only_if_they_have_evaluated(
    evaluated, decisions, monkeypatch
):
    monkeypatch.setattr("ddp_lab.resilience.guard.stop_reasons", lambda *_: {})
    guard = make_guard(Phases())
    decided = []
    guard._decide = lambda step, position, weights=(): bool(decided.append(step))
    position = Progress(epoch=2, step=3)
    loaders = {"train": SimpleNamespace(data=SimpleNamespace(size=SIZE))}
    guard.on_start(SimpleNamespace(sync=None, position=position, loaders=loaders, settings=None))
    guard.on_evaluate(evaluated)
    guard.on_epoch_end(position)
    assert decided == decisions
