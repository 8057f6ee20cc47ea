"""A run resumes on another number of replicas, if they divide its batch.

Otherwise it is refused and not changed.
"""

from pathlib import Path

import pytest
from checkpoints import assert_same, start
from launches import SMALL, newest, refusal_in_world
from worlds import run_world

LINE = ("strategy=ddp", "epochs=1")  # of a global batch of 24 samples
REFUSED = (
    "batch_size=24: is the global batch and must be divisible by the 5 replicas that share it; use "
    "20 or 25"
)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """Return the directory of a run of an epoch on two ranks."""
    run_dir = tmp_path_factory.mktemp("runs") / "mine"
    start(run_dir, 2, LINE)
    return run_dir


def test_replicas_that_do_not_divide_the_batch_are_refused_and_change_nothing(begun):
    before = contents(begun)
    line = [*SMALL, *LINE, "epochs=2", f"runs_dir={begun.parent}", "name=mine"]
    (code, printed), *others = run_world(5, refusal_in_world, " ".join(line))
    assert code == 2
    assert printed.startswith(f"error: {REFUSED}")
    assert others == [(2, "")] * 4
    assert contents(begun) == before


@pytest.mark.slow
def test_replicas_that_divide_the_batch_resume_the_run(begun, tmp_path):
    start(begun, 3, (*LINE, "epochs=2"))
    straight = tmp_path / "straight"
    start(straight, 2, (*LINE, "epochs=2"))
    assert_same(newest(straight), newest(begun), tolerance=1e-6)
