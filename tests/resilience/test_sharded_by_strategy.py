"""Sharded checkpoints: any strategy resumes from what the ranks of any other wrote."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cases import ADAMW, VIT, assert_equal, ddp, ddp_pipeline, fsdp, mesh, pipeline, tp
from training import Case, Outcome, largest_difference, run_cases
from worlds import once, run_world

from ddp_lab.resilience.sharded_files import METADATA, STATE, read_manifest
from ddp_lab.resilience.sharded_read import ShardedCheckpoint
from ddp_lab.strategies.single import Single

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
