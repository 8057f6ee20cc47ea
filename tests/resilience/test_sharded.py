"""Sharded checkpoints: every rank writes its share, any strategy resumes, and what is damaged or crafted is refused unread."""

import ctypes
import gc
import itertools
import os
import pickle
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from cases import ADAMW, VIT, assert_equal, ddp, ddp_pipeline, fsdp, mesh, pipeline, tp
from configs import config
from launches import SMALL, launch, main_in_world, read_metrics
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from training import Case, Outcome, largest_difference, run_cases
from worlds import once, run_world

from ddp_lab.config.errors import ConfigError
from ddp_lab.resilience.checkpoint import Checkpoints
from ddp_lab.resilience.checkpoint_folder import best_in, steps_in
from ddp_lab.resilience.fault_injection import fill_disk
from ddp_lab.resilience.sharded_files import (
    MANIFEST,
    METADATA,
    STATE,
    damage_of_shards,
    read_manifest,
    record_file,
    write_manifest,
)
from ddp_lab.resilience.sharded_read import ShardedCheckpoint, read_metadata
from ddp_lab.run.job import SHARDED_FROM, Job
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.ddp import DDP
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.single import Single
from ddp_lab.training.ema import EMA
from ddp_lab.training.loop import next_epoch
from ddp_lab.training.progress import Progress
from ddp_lab.training.schedule import cosine, make_scheduler
from ddp_lab.world.runtime import Runtime

MOVED = {"epochs": 2, "samples": 49, "ema": 0.8}  # three steps an epoch
VITS = VIT | ADAMW | MOVED
RUNS = {  # case and number of ranks; each can resume from those of the same model
    "single@1": (Case(Single, **MOVED), 1),
    "ddp@2": (ddp(**MOVED), 2),
    "fsdp@2": (fsdp(**MOVED), 2),
    "fsdp@4": (fsdp(reshard=False, **MOVED), 4),
    "pipeline@2": (pipeline("interleaved1f1b", stages=4, **MOVED), 2),
    "ddp_pipeline@4": (ddp_pipeline(2, "1f1b", **MOVED), 4),
    "tp@2": (tp(2, **MOVED), 2),
    "vit@1": (Case(Single, **VITS), 1),
    "mesh tp@2": (mesh(tp=2, sequence=True, **VITS), 2),
    "mesh fsdp tp@4": (mesh(shard=None, tp=2, **VITS), 4),
    "mesh hsdp@4": (mesh(shard=2, **VITS), 4),
    "mesh pp tp@4": (mesh(pp=2, tp=2, **VITS), 4),
}
# In make test, replicas, shards, stages and a mesh with tp write; single, fsdp on two numbers of ranks, stages and tp read.
QUICK = [
    ("fsdp@2", "single@1"),
    ("ddp@2", "fsdp@2"),
    ("pipeline@2", "fsdp@2"),
    ("fsdp@2", "pipeline@2"),
    ("ddp@2", "tp@2"),
    ("fsdp@2", "fsdp@4"),
    ("mesh tp@2", "vit@1"),
]
# The rest of two rings, in which every run is a writer once and a reader once.
RINGS = [[name for name, (case, _) in RUNS.items() if case.model == model] for model in ("lenet", "vit")]
SLOW = [pair for ring in RINGS for pair in itertools.pairwise([*ring, ring[0]]) if pair not in QUICK]
PAIRS = [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
STEP_3, STEP_6 = "step_00000003", "step_00000006"


class Moved(NamedTuple):
    """The directory of the writers' checkpoints, and each rank's outcomes of runs that resumed after the first epoch."""

    folder: Path
    straight: dict[str, Outcome]  # of single, without an interruption, by model
    resumed: dict[tuple[str, str], list[Outcome]]


@once
def moved(parent: Path, pairs: tuple[tuple[str, str], ...]) -> Moved:
    """Let each writer train for two epochs, and each reader resume after the first. `single` writes whole checkpoints."""
    folder = parent / f"sharded-{len(pairs)}"
    whole = {case.model: replace(case, save=str(folder / case.model)) for case in (RUNS["single@1"][0], RUNS["vit@1"][0])}
    writers = {name: replace(RUNS[name][0], sharded=True, save=str(folder / name)) for name, _ in pairs}
    readers = {pair: replace(RUNS[pair[1]][0], resume=str(folder / pair[0] / f"{STEP_3}.sharded")) for pair in pairs}
    for name in [*whole, *writers]:
        (folder / name).mkdir(parents=True)
    resumed = {}
    for cases in (whole | writers, readers):
        for size in (1, 2, 4):
            here = {key: case for key, case in cases.items() if ranks_of(key) == size}
            ranks = run_world(size, run_cases, list(here.values()), timeout=240) if here else []
            resumed |= {key: [rank[case] for rank in ranks] for key, case in here.items()}
    return Moved(folder, {model: resumed[model][0] for model in whole}, resumed)


def ranks_of(key: str | tuple[str, str]) -> int:
    name = key if isinstance(key, str) else key[1]
    return RUNS[name][1] if name in RUNS else 1


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_every_strategy_resumes_from_the_shards_of_another(writer, reader, tmp_path):
    """Weights, averages, momentum and sums end as those of `single` without an interruption."""
    runs = moved(tmp_path.parent, tuple(QUICK if (writer, reader) in QUICK else SLOW))
    first, *others = runs.resumed[writer, reader]
    straight = runs.straight[RUNS[reader][0].model]
    assert len(first.sums) == 1, "it started from the beginning"
    assert_equal(first, replace(straight, sums=straight.sums[1:]))
    for outcome in others:
        assert (outcome.sums, outcome.evaluation) == (first.sums, first.evaluation)


WRITERS = dict(QUICK)
WRITERS_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in dict(SLOW) if name not in WRITERS]


@pytest.mark.parametrize("writer", [*WRITERS, *WRITERS_SLOW])
def test_merged_shards_are_the_whole_checkpoint_of_single(writer, tmp_path):
    folder = moved(tmp_path.parent, tuple(QUICK if writer in WRITERS else SLOW)).folder
    merged = ShardedCheckpoint(folder / writer / f"{STEP_3}.sharded").whole()
    expected = torch.load(folder / RUNS[writer][0].model / f"{STEP_3}.pt", weights_only=True)
    assert merged.keys() == expected.keys()
    for part in ("model", "ema"):
        assert list(merged[part]) == list(expected[part])
        assert largest_difference(merged[part], expected[part]) <= 1e-6
    states = [state["optimizer"]["state"] for state in (merged, expected)]
    assert list(states[0]) == list(states[1])
    flat = [{f"{name}.{key}": value for name, held in state.items() for key, value in held.items()} for state in states]
    assert largest_difference(*flat) <= 1e-5
    groups = [[group | {"foreach": None} for group in state["optimizer"]["param_groups"]] for state in (merged, expected)]
    assert groups[0] == groups[1]
    assert merged["scheduler"] == expected["scheduler"]
    assert merged["seed"] == expected["seed"]
    assert [merged["progress"][key] for key in ("epoch", "samples", "step")] == [2, 0, 3]


def test_every_rank_writes_a_part_and_nothing_twice(tmp_path):
    folder = moved(tmp_path.parent, tuple(QUICK)).folder
    size = (folder / "lenet" / f"{STEP_6}.pt").stat().st_size
    for writer in ("ddp@2", "fsdp@2", "pipeline@2"):
        files = read_manifest(folder / writer / f"{STEP_6}.sharded")
        assert files.keys() == {"__0_0.distcp", "__1_0.distcp", METADATA, STATE}
        shares = [files[f"__{rank}_0.distcp"].bytes for rank in range(2)]
        assert sum(shares) < 1.3 * size, "torch's files have about 1 KiB for each tensor"
        assert min(shares) > 0.2 * size, writer


def tiny(folder: Path, best: str | None = "test_loss", sharded: bool = True) -> Checkpoints:
    """Return the checkpoints of a linear layer with AdamW, of which the bias is the number of the epoch."""
    runtime = Runtime("cpu")
    strategy = Single(runtime)
    strategy.setup(nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(strategy.param_groups(), lr=0.1, weight_decay=0.0)
    shapes = {name: tuple(tensor.shape) for name, tensor in strategy.module.state_dict().items()}
    scheduler = make_scheduler(optimizer, cosine, 10, 1, 0)
    return Checkpoints(folder, runtime, strategy, optimizer, scheduler, shapes, best=best, sharded=sharded)


def step(checkpoints: Checkpoints) -> None:
    """Take an optimizer step that changes the weight only."""
    module = checkpoints.strategy.module
    module.weight.grad, module.bias.grad = torch.ones(1, 2), torch.zeros(1)
    checkpoints.optimizer.step()


def save_epochs(checkpoints: Checkpoints, losses: list[float], start: Progress | None = None) -> None:
    """Save a checkpoint after each epoch, which has one step."""
    progress = start or Progress()
    for loss in losses:
        checkpoints.strategy.module.bias.data.fill_(progress.epoch)
        step(checkpoints)
        progress = next_epoch(replace(progress, step=progress.step + 1, samples=1), loss, 0.5)
        checkpoints.save(progress)
    checkpoints.wait()
    assert checkpoints.problem is None


def resume(checkpoints: Checkpoints, choice: str = "auto") -> Progress:
    return checkpoints.resume(choice, lambda progress: progress.step)


def bias_in(path: Path) -> float:
    return ShardedCheckpoint(path).whole()["model"]["bias"].item()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_two_newest_and_the_best_are_kept(tmp_path):
    save_epochs(tiny(tmp_path), [3.0, 1.0, 2.0, 4.0, float("nan")])
    assert names(tmp_path) == [f"{name}.sharded" for name in ("best_00000002", "step_00000004", "step_00000005")]
    (best,) = best_in(tmp_path)
    assert damage_of_shards(best, Runtime("cpu")) is None
    assert bias_in(best) == 2
    checkpoints = tiny(tmp_path)
    assert resume(checkpoints, str(best)).epoch == 3
    assert checkpoints.strategy.module.bias.item() == 2
    assert names(tmp_path) == ["best_00000002.sharded"], "checkpoints of later steps are abandoned"


def test_best_shares_its_files_or_is_a_copy(tmp_path, monkeypatch):
    save_epochs(tiny(tmp_path), [3.0])
    assert (tmp_path / "best_00000001.sharded" / STATE).samefile(tmp_path / "step_00000001.sharded" / STATE)

    def refuse(source: Path, path: Path):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    checkpoints = tiny(tmp_path)
    save_epochs(checkpoints, [2.0], resume(checkpoints))
    (best,) = best_in(tmp_path)
    assert not (best / STATE).samefile(tmp_path / "step_00000002.sharded" / STATE)
    assert damage_of_shards(best, Runtime("cpu")) is None


def test_best_epoch_alone_is_not_resumed_from(tmp_path):
    checkpoints = tiny(tmp_path)
    save_epochs(checkpoints, [3.0])
    checkpoints.save(Progress(epoch=3, step=2, best_loss=1.0, best_epoch=2), newest=False)
    checkpoints.wait()
    assert names(tmp_path) == ["best_00000002.sharded", "step_00000001.sharded"]
    assert tiny(tmp_path).find("auto") == str(tmp_path / "step_00000001.sharded")


def test_optimizer_state_is_resumed_exactly(tmp_path):
    """The bias has never had a gradient, so AdamW has no state for it, neither before nor after."""
    first, second = tiny(tmp_path), tiny(tmp_path)
    first.strategy.module.weight.grad = torch.ones(1, 2)
    for _ in range(2):
        first.optimizer.step()
    first.save(Progress(step=2))
    first.wait()
    resume(second)
    weight, bias = second.strategy.module.weight, second.strategy.module.bias
    assert bias not in second.optimizer.state
    state, expected = second.optimizer.state[weight], first.optimizer.state[first.strategy.module.weight]
    assert state.keys() == expected.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(state[key], expected[key]) for key in state)
    assert state["step"] == 2
    for checkpoints in (first, second):
        checkpoints.optimizer.param_groups[0]["lr"] = 0.1
        step(checkpoints)
    assert torch.equal(weight, first.strategy.module.weight)


class Counting(torch.optim.SGD):
    """SGD that counts its steps in a number that is not a tensor."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["count"] = state.get("count", 0) + 1


def test_optimizer_state_that_is_no_tensor_is_saved(tmp_path):
    for _ in range(2):
        checkpoints = tiny(tmp_path)
        checkpoints.optimizer = Counting(checkpoints.strategy.param_groups(), lr=0.1, momentum=0.9)
        checkpoints.optimizer.param_groups[0]["initial_lr"] = 0.1
        progress = resume(checkpoints)
        save_epochs(checkpoints, [1.0], progress)
    weight = checkpoints.strategy.module.weight
    assert checkpoints.optimizer.state[weight]["count"] == 2
    whole = ShardedCheckpoint(tmp_path / "step_00000002.sharded").whole()
    assert whole["optimizer"]["state"]["weight"]["count"] == 2


@pytest.mark.parametrize(("saved", "expected"), [(True, 2), (False, 5)])
def test_averages_are_resumed_or_start_from_the_weights(saved, expected, tmp_path):
    first, second = tiny(tmp_path), tiny(tmp_path)
    bias = first.strategy.module.bias.data
    bias.fill_(1)
    first.ema = EMA(first.strategy, 0.75) if saved else None
    bias.fill_(5)
    if saved:
        first.ema.update()
    first.save(Progress(step=1))
    first.wait()
    second.ema = EMA(second.strategy, 0.75)
    resume(second)
    assert (second.strategy.module.bias.item(), second.ema.averages["bias"].item()) == (5, expected)
    assert ShardedCheckpoint(tmp_path / "step_00000001.sharded").has("ema") == saved


def test_both_formats_resume_from_each_other(tmp_path):
    progress = Progress()
    for sharded in (False, True, True, False):
        checkpoints = tiny(tmp_path, sharded=sharded)
        assert resume(checkpoints) == progress
        save_epochs(checkpoints, [5.0 - progress.epoch], progress)
        progress = checkpoints.kept
    assert [path.name for path in steps_in(tmp_path)] == ["step_00000003.sharded", "step_00000004.pt"]
    assert [path.name for path in best_in(tmp_path)] == ["best.pt"]


def test_checkpoint_of_the_same_step_is_replaced(tmp_path):
    checkpoints = tiny(tmp_path, best=None)
    for bias in (1, 2):
        checkpoints.strategy.module.bias.data.fill_(bias)
        checkpoints.save(Progress(step=1))
    checkpoints.wait()
    assert names(tmp_path) == ["step_00000001.sharded"]
    assert bias_in(tmp_path / "step_00000001.sharded") == 2


def damage(kind: str, folder: Path) -> None:
    share = folder / "__0_0.distcp"
    if kind == "missing":
        share.unlink()
    elif kind == "truncated":
        share.write_bytes(share.read_bytes()[:-1])
    elif kind == "lost":
        (folder / MANIFEST).unlink()
    else:
        path = share if kind == "flipped" else folder / kind
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped", "lost", METADATA, STATE, MANIFEST])
def test_damaged_shards_are_named_and_the_previous_checkpoint_resumed(kind, tmp_path, caplog):
    save_epochs(tiny(tmp_path, best=None), [1.0, 1.0])
    before, newest = steps_in(tmp_path)
    damage(kind, newest)
    checkpoints = tiny(tmp_path)
    with pytest.raises(ConfigError, match=f"resume={newest}: the checkpoint is damaged: "):
        resume(checkpoints, str(newest))
    assert resume(checkpoints).step == 1
    assert checkpoints.strategy.module.bias.item() == 1
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"{newest} is damaged (")
    assert warning.endswith(f"); resuming from {before}, the newest valid checkpoint")
    damage(kind, before)
    with pytest.raises(ConfigError, match="none of the run's checkpoints is valid"):
        resume(tiny(tmp_path))


class Malicious:
    def __init__(self, trace: Path):
        self.trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self.trace,)


def craft(kind: str, folder: Path, trace: Path) -> None:
    """Let a file of a checkpoint execute code when it is loaded with torch's own functions."""
    metadata = read_metadata(folder)
    share = folder / "__0_0.distcp"
    if kind == "pickle":
        metadata = Malicious(trace)
    elif kind == "object":  # torch loads what is not a tensor without restrictions
        metadata.state_dict_metadata["model.bias"] = BytesStorageMetadata()
        index = MetadataIndex("model.bias")
        content = pickle.dumps(Malicious(trace))
        metadata.storage_data[index] = replace(next(iter(metadata.storage_data.values())), offset=0, length=len(content))
        share.write_bytes(content)
    elif kind == "tensor":
        share.write_bytes(pickle.dumps(Malicious(trace)))
    elif kind == "path":
        for part in metadata.storage_data.values():
            part.relative_path = "../outside"
        shutil.copy(share, folder.parent / "outside")
    elif kind == "gap":
        metadata.state_dict_metadata["model.bias"].chunks.clear()
    elif kind == "state":
        torch.save({"progress": Malicious(trace)}, folder / STATE)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("rehashed", [False, True])
@pytest.mark.parametrize("kind", ["pickle", "object", "tensor", "path", "gap", "state"])
def test_crafted_checkpoint_does_not_run_code(kind, rehashed, tmp_path):
    """The hashes reveal the change. Restricted loading protects from somebody who writes another manifest, too."""
    save_epochs(tiny(tmp_path, best=None), [1.0])
    folder, trace = tmp_path / "step_00000001.sharded", tmp_path / "executed"
    craft(kind, folder, trace)
    if rehashed:
        write_manifest(folder, {name: record_file(folder / name) for name in read_manifest(folder)})
    with pytest.raises((ConfigError, pickle.UnpicklingError, RuntimeError)) as caught:
        resume(tiny(tmp_path))
    assert not trace.exists(), "the checkpoint ran code"
    assert ("none of the run's checkpoints is valid" in str(caught.value)) != rehashed


def test_manifest_has_no_names_outside_its_directory(tmp_path):
    save_epochs(tiny(tmp_path, best=None), [1.0])
    folder = tmp_path / "step_00000001.sharded"
    write_manifest(folder, read_manifest(folder) | {"../secret": record_file(folder / STATE)})
    assert damage_of_shards(folder, Runtime("cpu")) == "manifest.json is missing or damaged"


@pytest.mark.parametrize(
    ("left", "resumed"),
    [
        ("tmp", 2),  # complete, but killed before it was renamed
        ("replaced.tmp", 2),  # killed between two renames
        ("removed.tmp", 1),
        ("partial", 1),
    ],
)
def test_interrupted_save_is_completed_or_removed(left, resumed, tmp_path, caplog):
    save_epochs(tiny(tmp_path, best=None), [1.0, 1.0])
    newest = tmp_path / "step_00000002.sharded"
    if left == "partial":
        (newest / MANIFEST).unlink()
    newest.rename(tmp_path / f"step_00000002.sharded.{'tmp' if left == 'partial' else left}")
    assert resume(tiny(tmp_path, best=None)).step == resumed
    assert not caplog.records, "what is not complete is not a damaged checkpoint"
    assert names(tmp_path) == [f"step_0000000{step}.sharded" for step in range(1, resumed + 1)]


def test_training_waits_for_the_copy_and_not_for_the_disk(tmp_path):
    checkpoints = tiny(tmp_path, best=None)
    writing = checkpoints.shards.write_share

    def slowly(folder: Path, share):
        time.sleep(0.5)
        return writing(folder, share)

    checkpoints.shards.write_share = slowly
    seconds = []
    for number in (1, 2):
        start = time.perf_counter()
        checkpoints.strategy.module.bias.data.fill_(number)
        checkpoints.save(Progress(step=number))
        seconds.append(time.perf_counter() - start)
        checkpoints.strategy.module.bias.data.fill_(9)  # training continues while the file is being written
    checkpoints.wait()
    assert seconds[0] < 0.4 < seconds[1], "the second save must wait for the first"
    assert [bias_in(path) for path in steps_in(tmp_path)] == [1, 2]


def high_water() -> int:
    """Return the peak of this process's memory since `reset_high_water`, in bytes."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def reset_high_water() -> int:
    """Reset the peak of this process's memory, and return the memory in use. What is free is returned to the system first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return high_water()


def wide(runtime: Runtime, folder: Path, strategy: Strategy, layers: int = 8) -> Checkpoints:
    """Return the checkpoints of a model with layers of 1 MiB, after a training step."""
    strategy.input_shape = (512,)
    strategy.setup(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(layers)), nn.BatchNorm1d(512)))
    optimizer = torch.optim.SGD(strategy.param_groups(), lr=0.1, momentum=0.9)
    strategy.forward(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    shapes = {f"{i}.weight": (512, 512) for i in range(layers)}
    shapes |= {f"{layers}.{name}": tuple(t.shape) for name, t in nn.BatchNorm1d(512).state_dict().items()}
    scheduler = make_scheduler(optimizer, cosine, 10, 1, 0)
    return Checkpoints(folder, runtime, strategy, optimizer, scheduler, shapes, best=None, sharded=True)


def measure_memory(folder: Path) -> dict[str, int]:
    """Return how many bytes of memory a save and a resume of fsdp take on this rank."""
    with Runtime("cpu", timeout=60) as runtime:
        runtime.open_group()
        checkpoints = wide(runtime, folder, FSDP(runtime, True, "local", None))
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
        checkpoints = wide(runtime, folder, DDP(runtime, "local", 25.0, False, False, "none"), layers=1)
        checkpoints.strategy.module[1].running_mean.fill_(runtime.rank)  # within an epoch, statistics differ
        writing, problems = checkpoints.shards.write_share, []
        for number in (1, 2, 3):
            checkpoints.shards.write_share = fill_disk if (number, runtime.rank) == (2, 1) else writing
            checkpoints.save(Progress(step=number))
            checkpoints.wait()
            problems.append(checkpoints.problem)
        return problems


def die_while_saving(folder: Path) -> None:
    """Save, and let rank 1 be killed while the ranks write the next checkpoint."""
    with Runtime("cpu", timeout=60) as runtime:
        runtime.open_group()
        checkpoints = wide(runtime, folder, FSDP(runtime, True, "local", None), layers=1)
        writing = checkpoints.shards.write_share

        def killed(folder: Path, share):
            folder.mkdir(exist_ok=True)
            (folder / "__1_0.distcp").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

        for number in (1, 2):
            checkpoints.shards.write_share = killed if (number, runtime.rank) == (2, 1) else writing
            checkpoints.save(Progress(step=number))
        checkpoints.wait()


def test_no_rank_needs_more_memory_than_its_share(tmp_path):
    """The state has 16 MiB, of which each of two ranks has 8. Rank 0 needs 32 MiB for a whole one: gathered and copied."""
    for peaks in run_world(2, measure_memory, tmp_path):
        assert 6 * 2**20 < peaks["save"] < 14 * 2**20, "the copy of the share, and at most 6 MiB"
        assert peaks["resume"] < 6 * 2**20, "one part of a tensor at a time"


def test_rank_that_cannot_write_its_share_fails_the_checkpoint(tmp_path):
    problems, _ = run_world(2, fail_in_turn, tmp_path)
    assert problems[0] is problems[2] is None
    assert "step_00000002.sharded could not be written (rank 1: [Errno 28] No space left on device" in problems[1]
    assert f"the last valid checkpoint is {tmp_path}/step_00000001.sharded" in problems[1]
    assert names(tmp_path) == ["step_00000001.sharded", "step_00000003.sharded"]
    statistics = ShardedCheckpoint(tmp_path / "step_00000003.sharded").whole()["model"]["1.running_mean"]
    assert statistics.eq(0).all(), "BatchNorm's statistics must be those of replica 0"


def test_rank_killed_while_saving_leaves_the_previous_checkpoint(tmp_path):
    with pytest.raises(AssertionError, match="rank 1: died"):
        run_world(2, die_while_saving, tmp_path)
    checkpoints = tiny(tmp_path)
    assert checkpoints.find("auto") == str(tmp_path / "step_00000001.sharded")
    assert names(tmp_path) == ["step_00000001.sharded"]


@pytest.mark.parametrize(
    ("choice", "ranks", "size", "expected"),
    [
        ("auto", 2, SHARDED_FROM, True),
        ("auto", 2, SHARDED_FROM - 1, False),
        ("auto", 1, SHARDED_FROM, False),
        ("whole", 2, SHARDED_FROM, False),
        ("sharded", 1, 1, True),
    ],
)
def test_format_depends_on_size_and_ranks(choice, ranks, size, expected):
    job = Job(config(f"checkpoint.format={choice}"), SimpleNamespace(world_size=ranks))
    job.checkpoint_bytes = size
    assert job.sharded == expected


@pytest.mark.slow
def test_preempted_run_resumes_under_another_strategy_to_the_same_end(tmp_path):
    """The signal is received by one rank, within an epoch."""
    line = [*SMALL, "epochs=3", "ema=0.8", f"runs_dir={tmp_path}"]
    sharded = [*line, "name=sharded", "checkpoint.format=sharded"]
    fsdp = "torchrun --standalone --nproc_per_node=2 train.py strategy=fsdp inject=sigterm@rank=1,step=8"
    code, output = launch(fsdp, *sharded)
    assert "preempted at epoch 2" in output, (code, output)
    run_world(1, main_in_world, *sharded)
    run_world(1, main_in_world, *line, "name=whole")
    folder = tmp_path / "sharded" / "checkpoints"
    assert names(folder)[1:] == ["step_00000010.sharded", "step_00000015.sharded"]
    assert names(folder)[0].startswith("best_")
    state = ShardedCheckpoint(folder / "step_00000015.sharded").whole()
    expected = torch.load(tmp_path / "whole" / "checkpoints" / "step_00000015.pt", weights_only=True)
    for part in ("model", "ema"):
        assert largest_difference(state[part], expected[part]) <= 1e-6
    records = [[record["epoch"] for record in read_metrics(tmp_path / name)] for name in ("sharded", "whole")]
    assert records[0] == records[1] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_full_disk_of_any_rank_ends_the_run_and_keeps_the_last_valid_checkpoint(rank, tmp_path):
    line = [*SMALL, "epochs=3", f"runs_dir={tmp_path}", "name=full", "checkpoint.format=sharded", "strategy=fsdp"]
    code, output = launch("torchrun --standalone --nproc_per_node=2 train.py", *line, f"inject=disk_full@rank={rank},step=8")
    good = tmp_path / "full" / "checkpoints" / "step_00000005.sharded"
    assert code == 1
    assert f"rank {rank}: [Errno 28] No space left on device" in output
    assert f"the last valid checkpoint is {good}" in output
    assert damage_of_shards(good, Runtime("cpu")) is None
    assert not list(good.parent.glob("*.tmp"))
