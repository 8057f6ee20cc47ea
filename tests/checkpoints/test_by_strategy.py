"""Every strategy writes the checkpoint that `single` writes, in both formats, and resumes from what any other wrote."""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cases import (
    ADAMW,
    RECIPE,
    UNDECAYED,
    VIT,
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
from training import Case, Outcome, largest_difference, run_cases
from worlds import once, run_world

from ddp_lab.checkpoints.files import find_damage
from ddp_lab.checkpoints.sharded import ShardedCheckpoint
from ddp_lab.strategies.single import Single

LENETS = {"epochs": 2, "samples": 49, "ema": 0.8}  # three steps an epoch
VITS = VIT | ADAMW | LENETS
TIED = {"model": "tied", **ADAMW, **LENETS}
RUNS = {  # by model: case and number of ranks. Each writes both formats, and each resumes from the one before it
    "lenet": {
        "single@1": (Case(Single, **LENETS), 1),
        "ddp@2": (ddp(**LENETS), 2),
        "fsdp@2": (fsdp(**LENETS), 2),
        "pipeline@2": (pipeline("interleaved1f1b", stages=4, **LENETS), 2),
        "tp@2": (tp(2, **LENETS), 2),
        "ddp_pipeline@4": (ddp_pipeline(2, "1f1b", **LENETS), 4),
    },
    "vit": {
        "vit@1": (Case(Single, **VITS), 1),
        "mesh fsdp tp@4": (mesh(shard=None, tp=2, sequence=True, **VITS), 4),
        "mesh pp tp@4": (mesh(pp=2, tp=2, schedule="interleaved1f1b", **VITS), 4),
    },
    "tied": {"tied@1": (Case(Single, **TIED), 1), "tied fsdp@2": (fsdp(**TIED), 2)},
}
REFERENCES = {"lenet": "single@1", "vit": "vit@1", "tied": "tied@1"}
GROUPED = {"model": "unbiased", "epochs": 2, **UNDECAYED}
UNGROUPED = GROUPED | {"decay_norms_and_biases": True}
RECIPES = {  # runs of `single`, and the checkpoint from which others resume
    "recipe": (Case(Single, epochs=2, save_at=4, **RECIPE), 4),
    "one group": (Case(Single, **UNGROUPED), 3),
    "two groups": (Case(Single, **GROUPED), 3),
}
RESUMED = [  # a recipe, and a run of two ranks that resumes it
    ("recipe", scratch(epochs=2, loader="workers", **RECIPE)),
    ("recipe", pipeline("1f1b", epochs=2, **RECIPE)),
    ("one group", tp(2, **GROUPED)),
    ("two groups", fsdp(**UNGROUPED)),
]
Key = str | tuple[str, str, str] | Case  # a writer; a writer, a reader and the format; a recipe


class Moved(NamedTuple):
    """The directory of the writers' checkpoints, and each rank's outcomes."""

    folder: Path
    outcomes: dict[Key, list[Outcome]]


def ring(runs: dict) -> list[tuple[str, str, str]]:
    """Return writers, readers and formats: each run reads one format of the run before it and the other of the second before.

    That suffices, because all write the same (`test_every_strategy_writes_the_same_checkpoint_as_single`).
    """
    names = list(runs)
    back = {"pt": 1, "sharded": min(2, len(names) - 1)}
    return [(names[i - back[form]], name, form) for i, name in enumerate(names) for form in back]


def file_of(folder: Path, writer: str, form: str, step: int = 3) -> Path:
    return folder / writer / form / f"step_{step:08d}.{form}"


def writing(folder: Path, writer: str) -> Case:
    return replace(RECIPES[writer][0], save=str(folder / writer))


def resuming(folder: Path, writer: str, case: Case) -> Case:
    return replace(case, resume=str(file_of(folder, writer, "pt", RECIPES[writer][1])))


@once
def moved(parent: Path) -> Moved:
    """Let each run train for two epochs, and each reader resume after the first. One world per number of ranks runs all."""
    folder = parent / "moved"
    runs = {name: run for model in RUNS.values() for name, run in model.items()}
    writers: dict[Key, tuple[Case, int]] = {
        name: (replace(case, save=str(folder / name)), ranks) for name, (case, ranks) in runs.items()
    }
    writers |= {writing(folder, writer): (writing(folder, writer), 1) for writer in RECIPES}
    readers: dict[Key, tuple[Case, int]] = {
        pair: (replace(runs[pair[1]][0], resume=str(file_of(folder, *pair[::2]))), runs[pair[1]][1])
        for model in RUNS.values()
        for pair in ring(model)
    }
    for writer, case in RESUMED:
        for each, ranks in ((case, 2), (case.reference(), 1)):
            readers[resuming(folder, writer, each)] = (resuming(folder, writer, each), ranks)
    for case, _ in writers.values():
        Path(case.save).mkdir(parents=True)
    outcomes: dict[Key, list[Outcome]] = {}
    for cases in (writers, readers):
        for size in sorted({ranks for _, ranks in cases.values()}):
            here = {key: case for key, (case, ranks) in cases.items() if ranks == size}
            ranks = run_world(size, run_cases, list(here.values()), timeout=240)
            outcomes |= {key: [rank[case] for rank in ranks] for key, case in here.items()}
    return Moved(folder, outcomes)


READERS = [pytest.param(model, *pair, id="-".join(pair)) for model, runs in RUNS.items() for pair in ring(runs)]


@pytest.mark.parametrize(("model", "writer", "reader", "form"), READERS)
def test_every_strategy_resumes_what_another_wrote(model, writer, reader, form, tmp_path):
    """Weights, averages, momentum and sums end as those of `single` without an interruption, and are the same on all ranks."""
    outcomes = moved(tmp_path.parent).outcomes
    first, *others = outcomes[writer, reader, form]
    straight = outcomes[REFERENCES[model]][0]
    assert len(first.sums) == 1, "it started from the beginning"
    assert_equal(first, replace(straight, sums=straight.sums[1:]))
    for outcome in others:
        assert (outcome.sums, outcome.evaluation) == (first.sums, first.evaluation)


@pytest.mark.parametrize(("model", "writer"), [(model, writer) for model, runs in RUNS.items() for writer in runs])
def test_every_strategy_writes_the_same_checkpoint_as_single(model, writer, tmp_path):
    folder = moved(tmp_path.parent).folder
    expected = torch.load(file_of(folder, REFERENCES[model], "pt"), weights_only=True)
    merged = ShardedCheckpoint(file_of(folder, writer, "sharded")).content()
    for found in (torch.load(file_of(folder, writer, "pt"), weights_only=True), merged):
        assert found.keys() == expected.keys()
        for part in ("model", "ema"):
            assert largest_difference(found[part], expected[part]) <= 1e-6
        states = [state["optimizer"]["state"] for state in (found, expected)]
        flat = [{f"{name}.{key}": value for name, held in state.items() for key, value in held.items()} for state in states]
        assert largest_difference(*flat) <= 1e-5
        # tp sets another `foreach`, which affects how a step is computed and is not part of the state.
        groups, same = (
            [group | {"foreach": None, "params": sorted(group["params"])} for group in state["optimizer"]["param_groups"]]
            for state in (found, expected)
        )
        assert json.dumps(groups, sort_keys=True) == json.dumps(same, sort_keys=True)
        assert (found["scheduler"], found["seed"]) == (expected["scheduler"], expected["seed"])
        assert [found["progress"][key] for key in ("epoch", "samples", "step")] == [2, 0, 3]


def test_every_rank_of_a_sharded_or_cut_model_writes_a_part_and_nothing_twice(tmp_path):
    folder = moved(tmp_path.parent).folder
    size = file_of(folder, "single@1", "pt", 6).stat().st_size
    for writer in ("fsdp@2", "pipeline@2"):
        path = file_of(folder, writer, "sharded", 6)
        assert find_damage(path) is None
        shares = [file.stat().st_size for file in path.glob("*.safetensors")]
        assert len(shares) == 2
        assert sum(shares) < 1.1 * size
        assert min(shares) > 0.2 * size, writer


@pytest.mark.parametrize(("writer", "case"), RESUMED, ids=lambda value: value if isinstance(value, str) else case_name(value))
def test_recipe_resumes_under_any_strategy(writer, case, tmp_path):
    """The recipe resumes within an epoch; with one group or two, the other number of groups was saved."""
    folder, outcomes = moved(tmp_path.parent)
    reference = outcomes[resuming(folder, writer, case.reference())][0]
    assert_equal(outcomes[resuming(folder, writer, case)][0], reference)


def test_recipe_resumed_within_an_epoch_is_bit_identical(tmp_path):
    folder, outcomes = moved(tmp_path.parent)
    again = outcomes[resuming(folder, "recipe", RECIPES["recipe"][0].reference())][0]
    straight = outcomes[writing(folder, "recipe")][0]
    assert largest_difference(again.weights, straight.weights) == 0
    assert again.sums == straight.sums[1:]


def test_parameter_groups_are_those_of_this_launch(tmp_path):
    folder, outcomes = moved(tmp_path.parent)
    one = outcomes[resuming(folder, "two groups", Case(Single, **UNGROUPED))][0]
    two = outcomes[writing(folder, "two groups")][0]
    assert largest_difference(one.weights, two.weights) > 1e-5
