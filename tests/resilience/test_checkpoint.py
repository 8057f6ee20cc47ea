"""Checkpoints: a resume is exact, works between any two strategies, and refuses damaged and foreign files."""

import copy
import functools
import itertools
import os
import pickle
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from cases import LENET, RECIPE, SHORT, UNDECAYED, assert_equal, ddp, ddp_pipeline, fsdp, mesh, pipeline, scratch, tp
from cases import name as case_name
from launches import SMALL, main_in_world, only_run, read_metrics, refusal_in_world
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training import Case, Outcome, largest_difference, make_model, run_cases
from worlds import once, run_world

from ddp_lab.resilience.checkpoint import Checkpoints
from ddp_lab.resilience.checkpoint_files import damage as problem_of
from ddp_lab.resilience.checkpoint_files import write_atomically
from ddp_lab.resilience.checkpoint_folder import in_order
from ddp_lab.resilience.decisions import Agreement
from ddp_lab.resilience.guard import Guard, GuardSettings
from ddp_lab.resilience.run_directory import write_json
from ddp_lab.resilience.whole_state import copied
from ddp_lab.strategies.single import Single
from ddp_lab.training.ema import EMA
from ddp_lab.training.loop import next_epoch
from ddp_lab.training.progress import Progress
from ddp_lab.training.schedule import cosine, make_scheduler
from ddp_lab.world.runtime import Runtime


def start(run_dir: Path, ranks: int, overrides: tuple[str, ...]) -> None:
    """Train a small model. The learning rate is constant, so that a longer run begins with the same steps."""
    where = f"runs_dir={run_dir.parent}", f"name={run_dir.name}"
    run_world(ranks, main_in_world, *SMALL, "scheduler=constant", *where, *overrides)


@functools.cache
def first_launch(folder: Path, ranks: int, overrides: tuple[str, ...]) -> Path:
    run_dir = folder / f"first-{len(list(folder.glob('first-*')))}"
    start(run_dir, ranks, overrides)
    return run_dir


def train(tmp_path: Path, name: str, *overrides: str, ranks: int = 1) -> dict:
    """Start or resume a run and return its newest checkpoint. First launches are shared: each test gets a copy of the run."""
    run_dir = tmp_path / name
    if run_dir.exists() or "resume=" in str(overrides):
        start(run_dir, ranks, overrides)
    else:
        shutil.copytree(first_launch(tmp_path.parent, ranks, overrides), run_dir)
    newest = sorted((run_dir / "checkpoints").glob("step_*.pt"))[-1]
    return torch.load(newest, weights_only=True)


def assert_same(one: dict, other: dict, tolerance: float) -> None:
    places = [{key: state["progress"][key] for key in ("epoch", "samples", "step")} for state in (one, other)]
    assert places[0] == places[1]
    assert one["scheduler"] == other["scheduler"]
    for name, tensor in one["model"].items():
        assert torch.allclose(tensor, other["model"][name], rtol=0, atol=tolerance), name
        momenta = (state["optimizer"]["state"][name]["momentum_buffer"] for state in (one, other))
        assert torch.allclose(*momenta, rtol=0, atol=10 * tolerance), name


def test_resumed_run_is_bit_identical(tmp_path):
    straight = train(tmp_path, "straight", "epochs=4")
    train(tmp_path, "resumed", "epochs=2")
    resumed = train(tmp_path, "resumed", "epochs=4")
    assert_same(straight, resumed, tolerance=0)
    assert [record["epoch"] for record in read_metrics(tmp_path / "resumed")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("split", 1), ("scratch", 2)),
        (("ddp_pipeline", 4), ("dp", 1)),
        (("dp", 1), ("split", 1)),
        pytest.param(("single", 1), ("ddp", 2), marks=pytest.mark.slow),
        pytest.param(("ddp", 3), ("split", 1), marks=pytest.mark.slow),
        pytest.param(("scratch", 2), ("fsdp", 2), marks=pytest.mark.slow),
    ],
)
def test_strategy_resumes_the_run_of_another(first, second, tmp_path):
    straight = train(tmp_path, "straight", "epochs=3")
    train(tmp_path, "moved", "epochs=1", f"strategy={first[0]}", ranks=first[1])
    moved = train(tmp_path, "moved", "epochs=3", f"strategy={second[0]}", ranks=second[1])
    assert_same(straight, moved, tolerance=1e-6)
    assert [record["world_size"] for record in read_metrics(tmp_path / "moved")] == [first[1], second[1], second[1]]


CHANGING = {"train.log", "status.json", ".launch", ".lock", "0.json"}  # files that every launch changes
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
    assert written["model"].keys() == expected["model"].keys()
    assert written["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
    groups, expected_groups = (  # tp sets another `foreach`, which affects how a step is computed and is not part of the state
        [{key: value for key, value in group.items() if key != "foreach"} for group in state["optimizer"]["param_groups"]]
        for state in (written, expected)
    )
    assert groups == expected_groups
    assert_same(written, expected, tolerance=1e-6)
    assert largest_difference(written["ema"], expected["ema"]) <= 1e-6


@pytest.mark.parametrize(("source", "target"), PARAMS)
def test_every_strategy_resumes_what_another_wrote(source, target, tmp_path):
    """Weights, momentum and sums end as those of `single` without an interruption, and are the same on all ranks."""
    assert_resumed(moved(tmp_path.parent, is_slow(source, target)), source, target)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), ring(MESH_MOVES))
def test_every_mesh_resumes_what_another_wrote(source, target, tmp_path):
    runs = moved_over_meshes(tmp_path.parent)
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
        (0.1, ["first.1.weight", "second.weight"]),
        (0.0, ["second.bias"]),
    ]
    one = outcomes[resuming(folder, "two groups", Case(Single, **UNGROUPED))]
    two = outcomes[writing(folder, "two groups")]
    assert largest_difference(one.weights, two.weights) > 1e-5


def test_finished_run_is_not_changed(tmp_path):
    train(tmp_path, "done", "epochs=2")
    recorded = (tmp_path / "done" / "data.json").read_text()
    (tmp_path / "done" / "data.json").unlink()  # as in runs of older versions
    before = {
        path: path.read_bytes() for path in (tmp_path / "done").rglob("*") if path.is_file() and path.name not in CHANGING
    }
    train(tmp_path, "done", "epochs=2")
    after = {path: path.read_bytes() for path in (tmp_path / "done").rglob("*") if path.is_file() and path.name not in CHANGING}
    assert after == before | {tmp_path / "done" / "data.json": recorded.encode()}
    assert "nothing to do" in (tmp_path / "done" / "train.log").read_text()


def test_run_without_its_last_checkpoint_ends_the_same(tmp_path):
    """This is the state after a kill between the metrics and the checkpoint of the last epoch. The schedule spans the run."""
    overrides = "epochs=3", "scheduler=cosine", "warmup_epochs=0.5"
    whole = train(tmp_path, "cut", *overrides)
    records = read_metrics(tmp_path / "cut")
    (tmp_path / "cut" / "checkpoints" / "step_00000015.pt").unlink()
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "train_l')
    assert_same(whole, train(tmp_path, "cut", *overrides), tolerance=0)
    again = read_metrics(tmp_path / "cut")
    assert [record["epoch"] for record in again] == [1, 2, 3]
    rates = [record["lr"] for record in records]
    assert [record["lr"] for record in again] == rates
    assert 0.01 > rates[0] > rates[1] > rates[2] > 0


def test_resume_from_a_path_starts_a_new_run(tmp_path):
    train(tmp_path, "old", "epochs=2")
    path = tmp_path / "old" / "checkpoints" / "step_00000010.pt"
    continued = train(tmp_path, "new", "epochs=3", f"resume={path}")
    assert_same(continued, train(tmp_path, "old", "epochs=3"), tolerance=0)
    assert [record["epoch"] for record in read_metrics(tmp_path / "new")] == [3]
    tags = EventAccumulator(str(tmp_path / "new")).Reload().Tags()
    assert "config/text_summary" in tags["tensors"]


def test_resume_from_an_older_path_removes_later_checkpoints_and_metrics(tmp_path):
    train(tmp_path, "old", "epochs=2")
    train(tmp_path, "run", "epochs=5")
    path = tmp_path / "old" / "checkpoints" / "step_00000010.pt"
    assert train(tmp_path, "run", "epochs=4", f"resume={path}")["progress"]["epoch"] == 5
    assert [file.name for file in sorted((tmp_path / "run" / "checkpoints").glob("step_*.pt"))] == [
        "step_00000015.pt",
        "step_00000020.pt",
    ]
    assert [record["epoch"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_new_learning_rate_applies_after_a_resume(tmp_path):
    train(tmp_path, "faster", "epochs=1")
    train(tmp_path, "faster", "epochs=2", "optimizer.lr=0.02")
    assert [record["lr"] for record in read_metrics(tmp_path / "faster")] == [0.01, 0.02]


@pytest.mark.parametrize(
    ("strategy", "ranks", "first", "second"),
    [
        ("single", 1, 0, 0.9),
        ("fsdp", 2, 0.9, 0),
        *(
            pytest.param(strategy, ranks, first, second, marks=pytest.mark.slow)
            for strategy, ranks in (("single", 1), ("pipeline", 2), ("tp", 2), ("fsdp", 2))
            for first, second in ((0, 0), (0, 0.9), (0.9, 0))
            if (strategy, first, second) not in (("single", 0, 0.9), ("fsdp", 0.9, 0))
        ),
    ],
)
def test_momentum_may_be_added_or_removed_on_resume(strategy, ranks, first, second, tmp_path):
    """SGD without momentum has no state."""
    more = ["model=lenet", "strategy.tp=2", "strategy.plan={fc2:replicate}"] if strategy == "tp" else ["model=lenet"]
    train(tmp_path, "moved", "epochs=1", f"strategy={strategy}", f"optimizer.momentum={first}", *more, ranks=ranks)
    train(tmp_path, "one", "epochs=1", f"optimizer.momentum={first}", "model=lenet")
    moved = train(tmp_path, "moved", "epochs=2", f"strategy={strategy}", f"optimizer.momentum={second}", *more, ranks=ranks)
    one = train(tmp_path, "one", "epochs=2", f"optimizer.momentum={second}", "model=lenet")
    for name, tensor in one["model"].items():
        assert torch.allclose(tensor, moved["model"][name], rtol=0, atol=1e-6), name


def test_another_batch_size_keeps_the_position_in_the_schedule(tmp_path):
    """The schedule is halfway after half of the epochs, not after half of the steps."""
    train(tmp_path, "moved", "epochs=2", "scheduler=cosine", "batch_size=4")
    train(tmp_path, "moved", "epochs=4", "scheduler=cosine", "batch_size=50")
    train(tmp_path, "whole", "epochs=4", "scheduler=cosine", "batch_size=50")
    moved, whole = ([record["lr"] for record in read_metrics(tmp_path / name)] for name in ("moved", "whole"))
    assert moved[2:] == pytest.approx(whole[2:])
    assert moved[2] > 0.001


def test_kill_between_a_file_and_its_hash_loses_nothing(tmp_path):
    """The kill is between the two renames of write_atomically. A partial file of another save is removed."""
    train(tmp_path, "cut", "epochs=2")
    whole = train(tmp_path, "whole", "epochs=3")
    folder = tmp_path / "cut" / "checkpoints"
    digest = folder / "step_00000010.pt.sha256"
    digest.rename(folder / "step_00000010.sha256.tmp")
    digest.write_text(f"{64 * '0'}  step_00000010.pt\n")  # the hash of an earlier file of that name
    (folder / "step_00000011.tmp").write_bytes(b"partial")
    assert_same(whole, train(tmp_path, "cut", "epochs=3"), tolerance=0)
    log = (tmp_path / "cut" / "train.log").read_text()
    assert "resumed from" in log
    assert "damaged" not in log
    assert not list(folder.glob("*.tmp"))


def test_another_optimizer_is_refused(tmp_path):
    train(tmp_path, "mine", "epochs=1")
    line = [*SMALL, "scheduler=constant", f"runs_dir={tmp_path}", "name=mine", "epochs=2", "optimizer=adamw"]
    ((code, printed),) = run_world(1, refusal_in_world, " ".join(line))
    assert code == 2
    assert "step_00000005.pt: was written with another optimizer: its options are " in printed


def test_tensorboard_has_every_epoch_once_after_a_resume(tmp_path):
    train(tmp_path, "cut", "epochs=3")
    (tmp_path / "cut" / "checkpoints" / "step_00000015.pt").unlink()
    train(tmp_path, "cut", "epochs=4")
    events = EventAccumulator(str(tmp_path / "cut")).Reload().Scalars("loss/test")
    assert [event.step for event in events] == [1, 2, 3, 4]


def test_resume_never_does_not_overwrite_a_run(tmp_path):
    train(tmp_path, "mine", "epochs=1")
    before = (tmp_path / "mine" / "metrics.jsonl").read_text()
    line = f"runs_dir={tmp_path} name=mine resume=never"
    ((code, printed),) = run_world(1, refusal_in_world, line)
    assert code == 2
    assert "already contains a run. Choose another name" in printed
    assert (tmp_path / "mine" / "metrics.jsonl").read_text() == before


def damage(kind: str, path) -> None:
    content = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[:-100])
    elif kind == "flipped":
        path.write_bytes(content[:3000] + bytes([content[3000] ^ 1]) + content[3001:])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "foreign":
        torch.save({"weights": torch.zeros(3)}, path)
    elif kind == "half-deleted":
        path.with_name(path.name + ".sha256").unlink()
    elif kind == "lost":
        path.unlink()


@pytest.mark.parametrize("kind", ["truncated", "flipped", "empty", "foreign", "half-deleted", "lost"])
def test_damaged_file_is_named_and_the_previous_one_resumed(kind, tmp_path):
    whole = train(tmp_path, "run", "epochs=3")
    newest, before = (tmp_path / "run" / "checkpoints" / f"step_000000{step}.pt" for step in (15, 10))
    damage(kind, newest)
    assert_same(whole, train(tmp_path, "run", "epochs=3"), tolerance=0)
    log = (tmp_path / "run" / "train.log").read_text()
    assert f"WARNING {newest} is damaged (" in log
    assert f"resuming from {before}, the newest valid checkpoint" in log
    assert [record["epoch"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3]
    for path in (newest, before):
        damage(kind, path)
    line = f"{' '.join(SMALL)} runs_dir={tmp_path} name=run epochs=4"
    ((code, printed),) = run_world(1, refusal_in_world, line)
    assert code == 2
    assert "none of the run's checkpoints is valid" in printed
    assert all(str(path) in printed for path in (newest, before))


def test_flipped_byte_in_a_named_file_is_refused(tmp_path):
    train(tmp_path, "good", "epochs=1")
    path = tmp_path / "good" / "checkpoints" / "step_00000005.pt"
    damage("flipped", path)
    ((code, printed),) = run_world(1, refusal_in_world, f"{' '.join(SMALL)} runs_dir={tmp_path}/new resume={path}")
    assert code == 2
    assert f"resume={path}: the file is damaged: its SHA-256" in printed
    assert not (tmp_path / "new").exists(), "the damage must be found before a run directory is made"


def test_hash_file_passes_sha256sum(tmp_path):
    train(tmp_path, "good", "epochs=1")
    folder = tmp_path / "good" / "checkpoints"
    checked = subprocess.run(["sha256sum", "-c", "step_00000005.pt.sha256"], cwd=folder, capture_output=True, text=True)
    assert checked.stdout == "step_00000005.pt: OK\n"


def save_on_a_slow_disk(folder) -> tuple[list[float], dict, dict]:
    """Save twice. Return the seconds that each save blocks training, and the first one's weights in memory and in its file."""
    fsync = os.fsync
    os.fsync = lambda file: (time.sleep(1.0), fsync(file))
    runtime = Runtime("cpu")
    strategy = Single(runtime)
    strategy.setup(make_model("lenet", 0))
    optimizer = torch.optim.SGD(strategy.param_groups(), lr=0.1, momentum=0.9)
    shapes = {name: tuple(tensor.shape) for name, tensor in strategy.module.state_dict().items()}
    scheduler = make_scheduler(optimizer, cosine, 1, 10, 0)
    checkpoints = Checkpoints(folder, runtime, strategy, optimizer, scheduler, shapes)
    weights = copy.deepcopy(strategy.module.state_dict())
    seconds = []
    for step in (1, 2):
        start = time.perf_counter()
        checkpoints.save(Progress(step=step))
        seconds.append(time.perf_counter() - start)
        with torch.no_grad():
            for parameter in strategy.parameters():
                parameter.add_(1.0)  # training continues while the file is being written
    checkpoints.wait()
    return seconds, weights, torch.load(folder / "step_00000001.pt")["model"]


def test_training_waits_for_the_copy_and_not_for_the_disk(tmp_path):
    ((seconds, weights, written),) = run_world(1, save_on_a_slow_disk, tmp_path)
    assert seconds[0] < 0.5, "writing a file to this disk takes 2 s and more"
    assert seconds[1] > 1.5, "the second save must wait for the first"
    assert all(torch.equal(tensor, written[name]) for name, tensor in weights.items())


class Malicious:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (self.trace,)


def bad_file(kind: str, folder, good: dict) -> None:
    path = folder / "bad.pt"
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"progress": Malicious(str(folder / "executed"))}))
    elif kind == "archive":
        torch.save({"progress": Malicious(str(folder / "executed"))}, path)
    elif kind == "truncated":
        torch.save(good, path)
        path.write_bytes(path.read_bytes()[:1000])
    elif kind == "text":
        path.write_text("junk")
    elif kind == "empty":
        path.touch()
    elif kind == "foreign":
        torch.save(good["model"], path)
    elif kind == "renamed":
        torch.save(good | {"model": {f"module.{name}": tensor for name, tensor in good["model"].items()}}, path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("pickle", "cannot be read as a checkpoint"),
        ("archive", "cannot be read as a checkpoint"),
        ("truncated", "cannot be read as a checkpoint"),
        ("text", "cannot be read as a checkpoint"),
        ("empty", "cannot be read as a checkpoint"),
        ("foreign", "is not a checkpoint of ddp_lab: it lacks model, optimizer, progress, scheduler, seed"),
        ("renamed", "does not match the model: conv.0.weight is missing in the checkpoint, (16, 3, 3, 3) in the model"),
    ],
)
def test_bad_files_are_refused(kind, message, tmp_path):
    bad_file(kind, tmp_path, train(tmp_path, "good", "epochs=1"))
    line = f"{' '.join(SMALL)} runs_dir={tmp_path}/new resume={tmp_path}/bad.pt"
    ((code, printed),) = run_world(1, refusal_in_world, line)
    assert code == 2
    assert message in printed
    assert printed.count("error: ") == 1
    assert not (tmp_path / "executed").exists(), "the file ran code"
    assert not (tmp_path / "new").exists()


def test_copied_state_shares_all_tensors_but_those_that_the_next_step_changes():
    changing, other, rate = torch.zeros(4), torch.zeros(4), torch.zeros(())
    storages = {changing.untyped_storage().data_ptr()}
    state = {
        "model": {"own": changing, "gathered": other},
        "optimizer": {"state": {0: {"momentum": changing[1:]}}, "lr": [rate]},
    }
    found = copied(state, storages)
    for tensor in (changing, other, rate):
        tensor.fill_(1)
    assert found["model"]["own"].tolist() == [0, 0, 0, 0]
    assert found["optimizer"]["state"][0]["momentum"].tolist() == [0, 0, 0], "a view of the same storage"
    assert found["optimizer"]["lr"][0].item() == 0, "tensors in lists, which param_groups are, are always copied"
    assert found["model"]["gathered"] is other, "it is a copy already"
    assert state["model"]["own"] is changing


def test_copied_state_has_containers_of_its_own():
    state = {"param_groups": [{"lr": 0.1, "params": [0, 1]}], "scheduler": {"last_epoch": 3}}
    found = copied(state, set())
    state["param_groups"][0]["lr"] = 0.2
    state["scheduler"]["last_epoch"] = 4
    assert found == {"param_groups": [{"lr": 0.1, "params": [0, 1]}], "scheduler": {"last_epoch": 3}}


def test_only_the_last_two_checkpoints_and_the_best_are_kept(tmp_path):
    train(tmp_path, "many", "epochs=5")
    names = sorted(path.name for path in (tmp_path / "many" / "checkpoints").iterdir())
    assert names == [f"{name}.pt{end}" for name in ("best", "step_00000020", "step_00000025") for end in ("", ".sha256")]
    assert only_run(tmp_path).name == "many"


def test_checkpoints_are_saved_as_often_and_kept_as_many_as_asked(tmp_path):
    """The last epoch is always saved."""
    train(tmp_path, "run", "epochs=5", "checkpoint.every_epochs=2", "checkpoint.keep=3")
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*.pt"))
    assert names == ["step_00000010.pt", "step_00000020.pt", "step_00000025.pt"]


def test_resume_with_another_seed_logs_a_warning(tmp_path):
    assert train(tmp_path, "run", "epochs=1", "seed=3")["seed"] == 3
    train(tmp_path, "run", "epochs=2", "seed=3")
    log = tmp_path / "run" / "train.log"
    assert "so the order of the samples changes" not in log.read_text()
    train(tmp_path, "run", "epochs=3", "seed=4")
    assert "WARNING seed=4: the checkpoint has seed=3, so the order of the samples changes from here on" in log.read_text()


WRITERS = {
    "checkpoint": lambda path, step: write_atomically(path, {"step": step}, path.with_suffix(".tmp")),
    "json": lambda path, step: write_json(path, {"step": step}),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_files_are_replaced_and_never_written_in_place(write, tmp_path):
    """A process that has the old file open still reads all of it. So a kill at any time leaves the old or the new file."""
    path = tmp_path / "file.pt"
    write(path, 1)
    before = path.read_bytes()
    with path.open("rb") as reader:
        write(path, 2)
        assert reader.read() == before
    assert path.read_bytes() != before


def test_checkpoints_are_ordered_by_step():
    """This holds even if a step has more digits than the zero-padded file names."""
    paths = [Path(f"step_{step:08d}.pt") for step in (5, 99_999_999, 100_000_000)]
    assert in_order(reversed(paths)) == paths


def tiny_checkpoints(folder: Path, best: str | None = "test_loss") -> Checkpoints:
    runtime = Runtime("cpu")
    strategy = Single(runtime)
    strategy.setup(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(strategy.param_groups(), lr=0.1)
    shapes = {name: tuple(tensor.shape) for name, tensor in strategy.module.state_dict().items()}
    return Checkpoints(folder, runtime, strategy, optimizer, make_scheduler(optimizer, cosine, 10, 1, 0), shapes, best=best)


def save_epochs(checkpoints: Checkpoints, losses: list[float], accuracies: list[float], start: Progress | None = None) -> None:
    """Save a checkpoint after each epoch. The bias is the number of the epoch, and an epoch has one step."""
    progress = start or Progress()
    for loss, accuracy in zip(losses, accuracies, strict=True):
        checkpoints.strategy.module.bias.data.fill_(progress.epoch)
        progress = next_epoch(replace(progress, step=progress.step + 1, samples=1), loss, accuracy)
        checkpoints.save(progress)
    checkpoints.wait()


def epoch_of_best(folder: Path) -> float | None:
    """Return the epoch whose weights `best.pt` holds, after a check of its hash; None if there is no such file."""
    if not (folder / "best.pt").exists():
        return None
    assert problem_of(folder / "best.pt") is None
    return torch.load(folder / "best.pt", weights_only=True)["model"]["bias"].item()


@pytest.mark.parametrize(("best", "expected"), [("test_loss", 2), ("test_accuracy", 3), (None, None)])
def test_best_checkpoint_is_kept_besides_the_newest(best, expected, tmp_path):
    save_epochs(tiny_checkpoints(tmp_path, best), [3.0, 1.0, 2.0, 4.0, float("nan")], [0.1, 0.2, 0.5, 0.4, 0.9])
    assert epoch_of_best(tmp_path) == expected
    names = [path.name for path in sorted(tmp_path.glob("*.pt"))]
    assert names == ["best.pt"] * (best is not None) + ["step_00000004.pt", "step_00000005.pt"]
    assert not list(tmp_path.glob("*.tmp"))


def test_best_checkpoint_shares_its_file_or_is_a_copy(tmp_path, monkeypatch):
    checkpoints = tiny_checkpoints(tmp_path)
    save_epochs(checkpoints, [3.0], [0.1])
    assert (tmp_path / "best.pt").samefile(tmp_path / "step_00000001.pt")

    def refuse(source: Path, path: Path):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    save_epochs(checkpoints, [2.0], [0.1], Progress(epoch=2, step=1, best_loss=3.0, best_epoch=1))
    assert not (tmp_path / "best.pt").samefile(tmp_path / "step_00000002.pt")
    assert epoch_of_best(tmp_path) == 2


def test_resume_auto_ignores_the_best_checkpoint_and_a_path_accepts_it(tmp_path):
    checkpoints = tiny_checkpoints(tmp_path)
    save_epochs(checkpoints, [1.0, 2.0, 3.0], [0.1] * 3)
    assert checkpoints.find("auto") == str(tmp_path / "step_00000003.pt")
    assert checkpoints.resume(str(tmp_path / "best.pt"), lambda progress: progress.step).epoch == 2
    assert checkpoints.strategy.module.bias.item() == 1
    assert [path.name for path in tmp_path.glob("*.pt")] == ["best.pt"], "files of later steps are abandoned"
    assert checkpoints.find("auto") is None


@pytest.mark.parametrize(
    ("losses", "lost", "resumed", "expected"),
    [
        ([2.0, 1.0, 3.0], False, 3, 2),  # the best is from before
        ([3.0, 2.0, 1.0], True, 3, 3),  # killed between the file and its second name
        ([3.0, 2.0, 1.0], False, 2, 2),  # the newest is given up
        ([1.0, 3.0, 0.5], False, 2, None),  # the best is given up, and the one before it is no longer there
    ],
)
def test_best_checkpoint_is_corrected_on_resume(losses, lost, resumed, expected, tmp_path):
    checkpoints = tiny_checkpoints(tmp_path)
    save_epochs(checkpoints, losses, [0.1] * 3)
    if lost:
        (tmp_path / "best.pt").unlink()
    again = tiny_checkpoints(tmp_path)
    progress = again.resume(str(tmp_path / f"step_0000000{resumed}.pt"), lambda progress: progress.step)
    assert epoch_of_best(tmp_path) == expected
    save_epochs(again, [9.0], [0.1], progress)
    assert epoch_of_best(tmp_path) == expected, "the best test loss must survive a resume"


def test_best_checkpoint_that_cannot_be_corrected_is_logged(tmp_path, caplog):
    save_epochs(tiny_checkpoints(tmp_path), [3.0, 2.0], [0.1] * 2)
    newest = tmp_path / "step_00000002.pt"
    newest.with_name("step_00000002.pt.sha256").unlink()
    assert tiny_checkpoints(tmp_path).resume(str(newest), lambda progress: progress.step).epoch == 3
    assert "best.pt could not be written" in caplog.text


@pytest.mark.parametrize(("loss", "saved"), [(1.0, ["best.pt"]), (3.0, [])])
def test_best_epoch_is_saved_even_if_no_checkpoint_is_due(loss, saved, tmp_path):
    checkpoints = tiny_checkpoints(tmp_path)
    settings = GuardSettings(10, None, "stop", "stop", None)
    decisions = SimpleNamespace(begin=lambda step, tally: None, now=lambda *args: Agreement(None, False, False, False))
    watchdog = SimpleNamespace(at=lambda doing: None)
    start = Progress(epoch=2, step=1, best_loss=2.0, best_epoch=1)
    guard = Guard(settings, checkpoints.strategy, checkpoints, decisions, watchdog, start, None)
    guard.end_epoch(next_epoch(start, loss, 0.1), last=False)
    checkpoints.wait()
    assert [path.name for path in tmp_path.glob("*.pt")] == saved
    assert guard.progress is start, "a run cannot resume from the best with resume=auto"


def test_checkpoint_during_an_evaluation_has_weights_and_averages_in_their_places(tmp_path):
    """A preemption saves a checkpoint while the model has the averages as its weights."""
    checkpoints = tiny_checkpoints(tmp_path)
    bias = checkpoints.strategy.module.bias.data
    bias.fill_(1)
    checkpoints.ema = EMA(checkpoints.strategy, 0.75)
    bias.fill_(5)
    checkpoints.ema.update()
    with checkpoints.ema.in_use():
        assert bias.item() == 2
        checkpoints.save(Progress(step=1))
    checkpoints.wait()
    state = torch.load(tmp_path / "step_00000001.pt", weights_only=True)
    assert (state["model"]["bias"].item(), state["ema"]["bias"].item(), bias.item()) == (5, 2, 5)


@pytest.mark.parametrize(("saved", "expected"), [(True, 2), (False, 5)])
def test_averages_are_resumed_or_start_from_the_weights(saved, expected, tmp_path, caplog):
    first, second = tiny_checkpoints(tmp_path), tiny_checkpoints(tmp_path)
    bias = first.strategy.module.bias.data
    bias.fill_(1)
    first.ema = EMA(first.strategy, 0.75) if saved else None
    bias.fill_(5)
    if saved:
        first.ema.update()
    first.save(Progress(step=1))
    first.wait()
    second.ema = EMA(second.strategy, 0.75)
    with caplog.at_level("INFO", "ddp_lab"):
        second.resume("auto", lambda progress: progress.step)
    assert (second.strategy.module.bias.item(), second.ema.averages["bias"].item()) == (5, expected)
    assert ("they start from its weights" in caplog.text) != saved
