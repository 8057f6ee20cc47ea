"""How many steps lie between two exchanges: about half a second of them, and never more than losses are kept."""

import pytest
import torch

from ddp_lab.resilience import decisions
from ddp_lab.resilience.decisions import PERIOD, Decisions
from ddp_lab.tasks.base import Task
from ddp_lab.training.metrics import LONGEST, RunningSums
from ddp_lab.world.runtime import Runtime


def next_exchange(monkeypatch, seconds_per_step: float, steps: int) -> int:
    """Return how many steps after an exchange the next one is, after `steps` steps of this duration."""
    now = [100.0]
    monkeypatch.setattr(decisions.time, "monotonic", lambda: now[0])
    found = Decisions(Runtime("cpu"))
    found.begin(0, RunningSums(Task(), torch.device("cpu")))
    now[0] += steps * seconds_per_step
    found.exchange(steps, save_failed=False)
    return next(step for step in range(steps + 1, steps + 10**6) if found.due(step)) - steps


@pytest.mark.parametrize(
    ("seconds_per_step", "expected"),
    [(0.01, 50), (0.1, 5), (3.0, 1), (0.00001, LONGEST)],  # 0.5 s / 0.01 s; at most LONGEST
)
def test_exchanges_lie_half_a_second_apart_and_no_loss_is_overwritten(monkeypatch, seconds_per_step, expected):
    assert PERIOD == 0.5
    assert next_exchange(monkeypatch, seconds_per_step, 40) == expected


def test_first_of_the_most_steps_between_two_exchanges_is_found():
    """Its loss is in the place that the next step would overwrite."""
    found = Decisions(Runtime("cpu"))
    sums = RunningSums(Task(), torch.device("cpu"))
    found.begin(7, sums)
    for step in range(LONGEST):
        sums.add(torch.tensor([float("nan") if step == 0 else 1.0, 1.0], dtype=torch.float64))
    assert found.exchange(7 + LONGEST, save_failed=False).not_finite == (8, 0)
