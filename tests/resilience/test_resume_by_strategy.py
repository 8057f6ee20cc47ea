"""Every strategy writes the checkpoint that `single` writes, and resumes from what any other wrote."""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cases import (
    EMPTY_STAGE,
    LENET,
    RECIPE,
    SHORT,
    UNDECAYED,
    assert_equal,
    ddp,
    ddp_pipeline,
    fsdp,
    mesh,
    pipeline,
    scratch,
    tp,
)
from cases import name as case_name
from checkpoints import assert_same
from training import Case, Outcome, largest_difference, run_cases
from worlds import once, run_world

from ddp_lab.strategies.single import Single

MOVED = {"epochs": 2, "ema": 0.8}
MOVES = {  # case and number of ranks; each writes a checkpoint, and each resumes from every other one's
    "single@1": (Case(Single, **MOVED), 1),
    "scratch@2": (scratch(**MOVED), 2),
    "ddp@4": (ddp(**MOVED), 4),
    "fsdp@2": (fsdp(**MOVED), 2),
    "pipeline@2": (pipeline("1f1b", **MOVED), 2),
    "ddp_pipeline@4": (ddp_pipeline(2, "1f1b", **MOVED), 4),
    "tp@2": (tp(2, **MOVED), 2),
    "mesh@4": (mesh(shard=None, pp=2, **LENET | MOVED | {"samples": 59}), 4),
}
MOVED_VIT = SHORT | MOVED
MESH_MOVES = {  # the same for a model that every axis of a mesh divides
    "single@1": (Case(Single, **MOVED_VIT), 1),
    "fsdp@2": (fsdp(**MOVED_VIT), 2),
    "mesh on the host@2": (mesh(shard=None, offload=True, **MOVED), 2),
    "tp2@2": (mesh(tp=2, sequence=True, **MOVED), 2),
    "shard2 x tp2@4": (mesh(shard=2, tp=2, **MOVED), 4),
    "pp2 x tp2@4": (mesh(pp=2, tp=2, schedule="interleaved1f1b", **MOVED), 4),
    "replicate2 x shard2@4": (mesh(shard=2, **MOVED), 4),
}


class Moved(NamedTuple):
    """Each rank's outcomes of two epochs without an interruption, and of runs that resumed after the first epoch."""

    straight: dict[str, list[Outcome]]
    files: dict[str, dict]  # the checkpoint after epoch 1
    resumed: dict[tuple[str, str], list[Outcome]]  # by source and target


def run_by_size(cases: dict) -> dict:
    """Run each case on its number of ranks, with one world for all cases of a size. Return each case's outcomes by rank."""
    outcomes = {}
    for size in sorted({ranks for _, ranks in cases.values()}):
        here = {key: case for key, (case, ranks) in cases.items() if ranks == size}
        ranks = run_world(size, run_cases, list(here.values()), timeout=240)
        outcomes |= {key: [rank[case] for rank in ranks] for key, case in here.items()}
    return outcomes


def is_slow(source: str, target: str) -> bool:
    """Return whether neither is `single`: `make test` has every strategy as a source and as a target."""
    return "single@1" not in (source, target)


def ring(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of neighbours, in which each name is a source once and a target once.

    That suffices, because all sources write equal files (`test_every_strategy_writes_the_same_checkpoint_as_single`).
    """
    first, *others = names
    return list(itertools.pairwise([first, *others, first]))


STAR = [pair for name in MOVES for pair in dict.fromkeys([(name, "single@1"), ("single@1", name)])]
PAIRS = [*STAR, *ring(name for name in MOVES if name != "single@1")]
PARAMS = [pytest.param(*pair, marks=[pytest.mark.slow] * is_slow(*pair)) for pair in PAIRS]


@once
def moved(folder: Path, slow: bool) -> Moved:
    pairs = [pair for pair in PAIRS if is_slow(*pair) == slow]
    return move(folder / f"moved-{slow}", MOVES, pairs, "step_00000003.pt")


@once
def moved_over_meshes(folder: Path) -> Moved:
    return move(folder / "meshes", MESH_MOVES, ring(MESH_MOVES), "step_00000002.pt")


def move(folder: Path, moves: dict, pairs: list[tuple[str, str]], file: str) -> Moved:
    """Run each case of `moves`, and then for each pair the second case from the first one's `file`, of its first epoch."""
    folders = {name: folder / name for name in moves}
    for path in folders.values():
        path.mkdir(parents=True)
    straight = run_by_size({name: (replace(case, save=str(folders[name])), ranks) for name, (case, ranks) in moves.items()})
    paths = {name: folder / file for name, folder in folders.items()}
    resumed = run_by_size(
        {(source, target): (replace(moves[target][0], resume=str(paths[source])), moves[target][1]) for source, target in pairs}
    )
    return Moved(straight, {name: torch.load(path, weights_only=True) for name, path in paths.items()}, resumed)


@pytest.mark.parametrize("source", MOVES)
def test_every_strategy_writes_the_same_checkpoint_as_single(source, tmp_path):
    files = moved(tmp_path.parent, False).files
    written, expected = files[source], files["single@1"]
    assert orders(written) == orders(expected)
    groups, expected_groups = (  # tp sets another `foreach`, which affects how a step is computed and is not part of the state
        [{key: value for key, value in group.items() if key != "foreach"} for group in state["optimizer"]["param_groups"]]
        for state in (written, expected)
    )
    assert groups == expected_groups
    assert_same(written, expected, tolerance=1e-6)
    assert largest_difference(written["ema"], expected["ema"]) <= 1e-6


def orders(state: dict) -> list[list[str]]:
    """Return the names of a checkpoint's tensors, in the order in which they are saved."""
    return [list(tensors) for tensors in (state["model"], state["ema"], state["optimizer"]["state"])]


@pytest.mark.parametrize(("source", "target"), PARAMS)
def test_every_strategy_resumes_what_another_wrote(source, target, tmp_path):
    """Weights, momentum and sums end as those of `single` without an interruption, and are the same on all ranks."""
    assert_resumed(moved(tmp_path.parent, is_slow(source, target)), source, target)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), ring(MESH_MOVES))
def test_every_mesh_resumes_what_another_wrote(source, target, tmp_path):
    runs = moved_over_meshes(tmp_path.parent)
    assert orders(runs.files[source]) == orders(runs.files["single@1"])
    assert largest_difference(runs.files[source]["model"], runs.files["single@1"]["model"]) <= 1e-6
    assert largest_difference(runs.files[source]["ema"], runs.files["single@1"]["ema"]) <= 1e-6
    assert_resumed(runs, source, target)


def assert_resumed(runs: Moved, source: str, target: str) -> None:
    reference = runs.straight["single@1"][0]
    first, *others = runs.resumed[source, target]
    assert len(first.sums) == 1, "it started from the beginning"
    assert_equal(first, replace(reference, sums=reference.sums[1:]))
    for outcome in others:
        assert outcome.sums == first.sums
        assert outcome.evaluation == first.evaluation


GROUPED = {"model": "unbiased", "epochs": 2, **UNDECAYED}  # one stage of its pipeline has no biases
UNGROUPED = GROUPED | {"decay_norms_and_biases": True}
RECIPES = {  # runs, and the checkpoint from which others resume
    "recipe": (Case(Single, epochs=2, save_at=4, **RECIPE), "step_00000004.pt"),
    "one group": (Case(Single, **UNGROUPED), "step_00000003.pt"),
    "two groups": (Case(Single, **GROUPED), "step_00000003.pt"),
}
RESUMED = [
    ("recipe", scratch(epochs=2, loader="workers", **RECIPE)),
    ("recipe", pipeline("1f1b", epochs=2, **RECIPE)),
    *(("one group", case) for case in (pipeline("gpipe", **GROUPED), fsdp(**GROUPED), tp(2, **GROUPED))),
    ("one group", pipeline("gpipe", **GROUPED | EMPTY_STAGE)),
    *(("two groups", case) for case in (pipeline("gpipe", **UNGROUPED), fsdp(**UNGROUPED), tp(2, **UNGROUPED))),
]


def writing(folder: Path, writer: str) -> Case:
    return replace(RECIPES[writer][0], save=str(folder / writer))


def resuming(folder: Path, writer: str, case: Case) -> Case:
    return replace(case, resume=str(folder / writer / RECIPES[writer][1]))


@once
def resumed(folder: Path) -> dict[Case, Outcome]:
    """Return the outcomes of the writers, of RESUMED, and of `single` that resumes from the same checkpoints."""
    for writer in RECIPES:
        (folder / writer).mkdir()
    on_one = [resuming(folder, writer, case.reference()) for writer, case in RESUMED]
    alone = run_world(1, run_cases, [*(writing(folder, writer) for writer in RECIPES), *dict.fromkeys(on_one)])[0]
    return alone | run_world(2, run_cases, [resuming(folder, *pair) for pair in RESUMED])[0]


@pytest.mark.parametrize(("writer", "case"), RESUMED, ids=lambda value: value if isinstance(value, str) else case_name(value))
def test_recipe_resumes_under_any_strategy(writer, case, tmp_path):
    """The recipe resumes within an epoch; with one group or two, the other number of groups was saved."""
    outcomes = resumed(tmp_path.parent)
    reference = outcomes[resuming(tmp_path.parent, writer, case.reference())]
    assert_equal(outcomes[resuming(tmp_path.parent, writer, case)], reference)


def test_recipe_resumed_within_an_epoch_is_bit_identical(tmp_path):
    outcomes, case = resumed(tmp_path.parent), RECIPES["recipe"][0]
    again = outcomes[resuming(tmp_path.parent, "recipe", replace(case, save_at=0))]
    straight = outcomes[writing(tmp_path.parent, "recipe")]
    assert largest_difference(again.weights, straight.weights) == 0
    assert again.sums == straight.sums[1:]


def test_parameter_groups_are_those_of_this_launch(tmp_path):
    outcomes, folder = resumed(tmp_path.parent), tmp_path.parent
    saved = {
        writer: torch.load(folder / writer / RECIPES[writer][1], weights_only=True) for writer in ("one group", "two groups")
    }
    groups = {writer: state["optimizer"]["param_groups"] for writer, state in saved.items()}
    assert [group["weight_decay"] for group in groups["one group"]] == [0.1]
    assert [(group["weight_decay"], group["params"]) for group in groups["two groups"]] == [
        (0.1, ["first.0.weight", "second.weight"]),
        (0.0, ["second.bias"]),
    ]
    one = outcomes[resuming(folder, "two groups", Case(Single, **UNGROUPED))]
    two = outcomes[writing(folder, "two groups")]
    assert largest_difference(one.weights, two.weights) > 1e-5
