"""Sharded checkpoints of several ranks: their memory, and what is left when one of them fails."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import names, resume
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from worlds import run_world

from ddp_lab.checkpoints import sharded
from ddp_lab.checkpoints.checkpoints import Checkpoints
from ddp_lab.checkpoints.sharded import SafetensorsWriter, ShardedCheckpoint
from ddp_lab.checkpoints.state import State
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.ddp import DDP
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.training.progress import Progress
from ddp_lab.training.schedule import Horizon, cosine, make_scheduler
from ddp_lab.world.runtime import Runtime


def high_water() -> int:
    """Return the peak of this process's memory since `reset_high_water`, in bytes."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def reset_high_water() -> int:
    """Reset the peak of this process's memory, and return the memory in use.

    What is free is returned to the system first.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return high_water()


def wide(
    runtime: Runtime, folder: Path, strategy: Strategy, layers: int = 8, **options: Any
) -> Checkpoints:
    """Return the checkpoints of a model with layers of 1 MiB, after a training step."""
    strategy.expect(example=torch.empty(2, 512, device="meta"))
    strategy.setup(
        nn.Sequential(
            *(nn.Linear(512, 512, bias=False) for _ in range(layers)), nn.BatchNorm1d(512)
        )
    )
    optimizer = torch.optim.SGD(strategy.module.parameters(), lr=0.1, momentum=0.9)
    strategy.forward(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    shapes = {f"{i}.weight": (512, 512) for i in range(layers)}
    shapes |= {
        f"{layers}.{name}": tuple(t.shape) for name, t in nn.BatchNorm1d(512).state_dict().items()
    }
    scheduler = make_scheduler(optimizer, cosine, Horizon(10), 1)
    return Checkpoints(
        folder, State(strategy, optimizer, scheduler, shapes), sharded=True, **options
    )


def measure_memory(folder: Path) -> dict[str, int]:
    """Return how many bytes of memory a save and a resume of fsdp take on this rank."""
    sharded.FILE_BYTES = 2**20
    with Runtime("cpu", timeout=60) as runtime:
        runtime.open_group()
        checkpoints = wide(runtime, folder, FSDP(runtime, True, "local"))
        checkpoints.save(Progress(step=1))  # the first save loads modules
        checkpoints.wait()
        resume(checkpoints)
        peaks = {}
        before = reset_high_water()
        checkpoints.save(Progress(step=2))
        checkpoints.wait()
        peaks["save"] = high_water() - before
        before = reset_high_water()
        resume(checkpoints)
        peaks["resume"] = high_water() - before
        return peaks


def fail_in_turn(folder: Path) -> list[str | None]:
    """Save three times, and let rank 1 fail the second time. Return the problems."""
    with Runtime("cpu", timeout=60) as runtime:
        runtime.open_group()

        def write_fails(path: Path) -> None:
            if (path.stem, runtime.rank) == ("step_00000002", 1):
                Path("/dev/full").write_bytes(b"0")

        strategy = DDP(runtime, "local", 25.0, find_unused_parameters=False)
        checkpoints = wide(runtime, folder, strategy, layers=1, before_write=write_fails)
        # within an epoch, statistics differ
        checkpoints.state.strategy.module[1].running_mean.fill_(runtime.rank)
        problems = []
        for number in (1, 2, 3):
            checkpoints.save(Progress(step=number))
            checkpoints.wait()
            problems.append(checkpoints.problem)
        return problems


def test_no_rank_needs_more_memory_than_its_share(tmp_path):
    """The state has 16 MiB, of which each of two ranks has 8.

    Rank 0 needs 32 MiB for one file: gathered and copied.
    """
    for peaks in run_world(2, measure_memory, tmp_path):
        assert 6 * 2**20 < peaks["save"] < 14 * 2**20, (
            "the copy of the shards, and up to three times the size of a file"
        )
        assert peaks["resume"] < 6 * 2**20, "one part of a tensor at a time"


def test_rank_that_cannot_write_its_shards_fails_the_checkpoint(tmp_path):
    problems, _ = run_world(2, fail_in_turn, tmp_path)
    assert problems[0] is problems[2] is None
    assert (
        "step_00000002.sharded could not be written (rank 1: No space left on device; without it "
        in problems[1]
    )
    assert f"the last valid checkpoint is {tmp_path}/step_00000001.sharded" in problems[1]
    assert names(tmp_path) == ["step_00000001.sharded", "step_00000003.sharded"]
    statistics = ShardedCheckpoint(tmp_path / "step_00000003.sharded").content()["model"][
        "1.running_mean"
    ]
    assert statistics.eq(0).all(), "BatchNorm's statistics must be those of replica 0"


@pytest.mark.parametrize(("file_bytes", "files"), [(None, 1), (2 * 2**20, 2), (2**20, 4)])
def test_files_have_about_the_size_that_is_set(file_bytes, files, tmp_path, monkeypatch):
    """Four tensors of 1 MiB. By default a small checkpoint is one file of each rank."""
    if file_bytes is not None:
        monkeypatch.setattr(sharded, "FILE_BYTES", file_bytes)
    tensors = {f"{number}": torch.full((2**18,), float(number)) for number in range(4)}
    writer = SafetensorsWriter(tmp_path, lambda: None)
    save(tensors, storage_writer=writer, no_dist=True)
    written = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(written) == files
    assert sorted(writer.digests) == written
