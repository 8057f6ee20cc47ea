"""How far it is from the command to its subject: the files that calls pass through.

tests/test_startup.py counts the files that are loaded. The numbers are those of LeNet on one
device. A change that exceeds one adds a detour to every reader's way: find a shorter one before
raising it.
"""

import statistics
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from launches import SMALL, main_in_world
from paths import after_each, calls, files_on_stack
from torch.nn.parallel import DistributedDataParallel
from worlds import run_world

MOST_TO_DDP = 8  # files from the start to the constructor of torch's class, with train.py
MOST_IN_STEP = 11  # files between two backward passes
MOST_CHANGES = 16  # changes from one file to another between them
LENET = [
    "model=lenet",
    "data=digits",
    "strategy=single",
    "device=cpu",
    "tracker=none",
    "epochs=1",
    "batch_size=64",
]


def way_to_ddp(folder: Path) -> list[str]:
    """Train with strategy=ddp; return the files on the way to torch's class."""
    stacks: list[list[str]] = []
    after_each(DistributedDataParallel, "__init__", lambda: stacks.append(files_on_stack()))
    main_in_world(*SMALL, "strategy=ddp", "epochs=1", f"runs_dir={folder}", "name=run")
    return stacks[0]


def test_way_to_distributed_data_parallel_is_short(tmp_path):
    way = run_world(2, way_to_ddp, tmp_path)[0]
    assert way[-1] == "strategies/ddp.py"
    assert not [name for name in way if name.startswith(("lab/", "advise/"))]
    assert len(["train.py", *way]) <= MOST_TO_DDP, way


def files_of_steps(folder: Path) -> list[list[str]]:
    """Train LeNet; return the files of the calls between each two backward passes, in order."""
    marks: list[int] = []
    with calls() as files:
        after_each(torch.Tensor, "backward", lambda: marks.append(len(files)))
        main_in_world(*LENET, f"runs_dir={folder}", "name=run")
    return [files[first:second] for first, second in pairwise(marks)]


def changes_in(files: list[str]) -> int:
    """Return how often two calls in succession are of different files."""
    return sum(first != second for first, second in pairwise(files))


@pytest.mark.slow
def test_step_passes_through_few_files(tmp_path):
    steps = run_world(1, files_of_steps, tmp_path)[0]
    assert len(steps) == 5
    usual = statistics.mode(map(tuple, steps))  # between two exchanges of the ranks
    assert len(set(usual)) <= MOST_IN_STEP, sorted(set(usual))
    assert changes_in(list(usual)) <= MOST_CHANGES, usual
