"""A run keeps nothing per step: neither in memory nor in its files."""

import ctypes
import gc
import sys
from pathlib import Path

import psutil
import pytest
import torch
from launches import main_in_world
from torch import nn
from worlds import run_world

pytestmark = pytest.mark.slow
EPOCHS = 5
FEW = 200  # steps of the shorter run
MANY = 2000  # steps of the longer one
# steps of the longer run, in which what is held is counted: four epochs begin or end before the
# first
BETWEEN = 900, 1900
OPTIONS = [
    "data.loader=workers",
    "data.num_workers=1",
    "ema=0.9",
    "checkpoint.format=sharded",
    "log_every=off",
]


class MallInfo(ctypes.Structure):
    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]


def heap_bytes() -> int:
    """Return the bytes that the C library has allocated, as for tensors and autograd's graphs."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallInfo
    info = mallinfo()
    return info.field4 + info.field7  # hblkhd, uordblks


class Counting(nn.Module):
    """A small model that counts what its process holds, in two of its training steps."""

    # Python's objects, bytes of the C library, open files and threads, child processes
    counts: list[tuple[int, int, int, int]] = []

    def __init__(self, in_channels: int, image_size: int, num_classes: int):
        super().__init__()
        self.layer = nn.Linear(in_channels * image_size**2, num_classes)
        self.steps = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        if self.training and self.steps in BETWEEN:
            gc.collect()
            this_process = psutil.Process()
            opened = this_process.num_fds() + this_process.num_threads()
            children = len(this_process.children(recursive=True))
            self.counts.append((sys.getallocatedblocks(), heap_bytes(), opened, children))
        return self.layer(inputs.flatten(1))


def train(runs_dir: Path) -> list[tuple[int, int, int, int]]:
    """Train twice for the same number of epochs. Return the counts."""
    small = [
        "data.dataset.channels=1",
        "data.dataset.image_size=4",
        "data.dataset.num_classes=4",
        "data.dataset.test_size=16",
    ]
    options = [
        *small,
        "data=synthetic",
        "model=own",
        f"model._target_={__name__}.Counting",
        "batch_size=4",
    ]
    for steps in (FEW, MANY):
        size = f"data.dataset.train_size={4 * steps // EPOCHS}"
        main_in_world(
            *options, size, f"epochs={EPOCHS}", f"runs_dir={runs_dir}", f"name=run{steps}", *OPTIONS
        )
    return Counting.counts


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[tuple[int, int, int, int]]]:
    """Return the directory of the two runs, and the counts."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_world(1, train, folder)[0]


def test_memory_does_not_grow_with_the_number_of_steps(trained):
    (objects, size, opened, children), (objects_later, size_later, opened_later, children_later) = (
        trained[1]
    )
    steps = BETWEEN[1] - BETWEEN[0]
    assert objects_later - objects < steps / 2, "an object is kept per step"
    assert size_later - size < 64 * steps, "tensors are kept per step"
    assert opened_later - opened < 10, "files stay open or threads stay"
    assert children_later == children, "worker processes are started per epoch"


@pytest.mark.parametrize(
    "kind", ["metrics.jsonl", "events.*", "train.log", "checkpoints/**/*", "**/*"]
)
def test_files_do_not_grow_with_the_number_of_steps(trained, kind):
    few, many = (
        [path for path in (trained[0] / f"run{steps}").glob(kind) if path.is_file()]
        for steps in (FEW, MANY)
    )
    assert len(few) == len(many) > 0
    sizes = [sum(path.stat().st_size for path in paths) for paths in (few, many)]
    assert sizes[1] < 1.05 * sizes[0] + 100, "records are written per step"
