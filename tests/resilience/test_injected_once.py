"""An injected fault is recorded by its complete text: one at step 5 is not one at step 50."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddp_lab.resilience.fault_injection import Fault
from ddp_lab.training.progress import Progress


def steps_taken(folder: Path, injection: str, steps: int) -> int:
    """Take steps, and return how many were taken before the fault."""
    run = SimpleNamespace(position=Progress())
    fault = Fault(injection, 0, folder)
    fault.on_start(cast("Any", run))
    for step in range(steps):
        run.position.step = step
        try:
            fault.before_step(step)
        except RuntimeError:
            return step
    return steps


@pytest.mark.parametrize("first", ["raise@rank=0,step=50", "raise@rank=0,step=51"])
def test_fault_is_injected_although_another_text_contains_it(first, tmp_path):
    assert steps_taken(tmp_path, first, 60) in (49, 50)
    assert steps_taken(tmp_path, "raise@rank=0,step=5", 60) == 4
    assert steps_taken(tmp_path, "raise@rank=0,step=5", 60) == 60, "it is injected once"
    assert (tmp_path / ".injected").read_text().splitlines() == [first, "raise@rank=0,step=5"]


def test_full_disk_does_not_keep_a_checkpoint_of_an_earlier_step_from_being_written(tmp_path):
    fault = Fault("disk_full@rank=0,step=5", 0, tmp_path)
    fault.on_start(cast("Any", SimpleNamespace(position=Progress(step=4))))
    fault.before_write(tmp_path / "step_00000009.pt")
    fault.before_step(None)
    fault.before_write(tmp_path / "step_00000004.pt")
    with pytest.raises(OSError, match="No space"):
        fault.before_write(tmp_path / "step_00000005.pt")
