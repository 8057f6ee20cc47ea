"""An injected fault is recorded by its complete text, so that one at step 5 is not taken for one at step 50."""

from pathlib import Path
from typing import Any, cast

import pytest

from ddp_lab.resilience.fault_injection import Fault


def steps_taken(folder: Path, injection: str, steps: int) -> int:
    """Take steps, and return how many were taken before the fault."""
    taken: list[Any] = []
    fault = Fault(cast("Any", taken.append), injection, 0, folder, cast("Any", None), 0)
    try:
        for step in range(steps):
            fault(step)
    except RuntimeError:
        return len(taken)
    return len(taken)


@pytest.mark.parametrize("first", ["raise@rank=0,step=50", "raise@rank=0,step=51"])
def test_fault_is_injected_although_another_text_contains_it(first, tmp_path):
    assert steps_taken(tmp_path, first, 60) in (49, 50)
    assert steps_taken(tmp_path, "raise@rank=0,step=5", 60) == 4
    assert steps_taken(tmp_path, "raise@rank=0,step=5", 60) == 60, "it is injected once"
    assert (tmp_path / ".injected").read_text().splitlines() == [first, "raise@rank=0,step=5"]
