"""scheduler=plateau: the learning rates are those that torch's class gives for the same metrics."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from launches import (
    SMALL,
    main_in_world,
    newest,
    read_metrics,
    read_steps,
    refusal_in_world,
)
from torch.optim.lr_scheduler import ReduceLROnPlateau
from worlds import run_world

from ddp_lab.observe.metrics_file import read_evaluations

LR = 0.05
SETTINGS = f"data.val_fraction=0.2 optimizer.lr={LR} epochs=7 device=cpu tracker=none log_every=1 "
SETTINGS += "scheduler=plateau"
# two epochs that are less than a tenth better
STRICT = "scheduler.threshold=0.1 scheduler.patience=1 scheduler.factor=0.3"
OPTIONS = {"threshold": 0.1, "patience": 1, "factor": 0.3}
# no epoch is better
HOPELESS = "scheduler.threshold=0.99 scheduler.patience=0 scheduler.factor=0.3"
EVERY_THREE = f"{STRICT} evaluate_every=3 epochs=5"
ACCURACY = "scheduler.metric=val_accuracy scheduler.patience=0 scheduler.threshold=2.0 "
ACCURACY += "scheduler.cooldown=1 scheduler.min_lr=0.01 scheduler.factor=0.4"
RUNS = {
    "single": STRICT,
    "accuracy": ACCURACY,
    "warm": f"{HOPELESS} warmup_steps=14 epochs=9",
    "other": f"{STRICT} epochs=4",
    "within": EVERY_THREE,
    "stopped": f"{EVERY_THREE} inject=sigterm@rank=0,step=14",
    "extended": f"{EVERY_THREE} max_steps=13",
}


def train(folder: Path, runs: dict[str, str]) -> None:
    for name, overrides in runs.items():
        with suppress(SystemExit):
            line = f"{SETTINGS} runs_dir={folder} name={name} {overrides}"
            main_in_world(*SMALL, *line.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_world(1, train, folder, RUNS)
    run_world(2, train, folder, {"ddp": f"{STRICT} strategy=ddp"})
    resumed = {"stopped": EVERY_THREE, "extended": EVERY_THREE}
    resumed["other"] = f"{STRICT} scheduler.metric=val_accuracy"
    shutil.copytree(folder / "stopped", folder / "on-two")
    run_world(1, train, folder, resumed)
    run_world(2, train, folder, {"on-two": f"{EVERY_THREE} strategy=ddp"})
    return folder


def rates_of_torch(
    run_dir: Path, metric: str, mode: str, begin: int = 0, **options: float
) -> list[float]:
    """Return the learning rate of each step that torch gives for the metrics from a step on."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = ReduceLROnPlateau(optimizer, mode, **options)
    evaluations = {row["step"]: row[metric] for row in read_evaluations(run_dir / "metrics.jsonl")}
    rates = []
    for row in read_steps(run_dir):
        rates.append(optimizer.param_groups[0]["lr"])
        if row["step"] in evaluations and row["step"] >= begin:
            scheduler.step(evaluations[row["step"]])
    return rates


def rates_of(run_dir: Path) -> list[float]:
    return [row["lr"] for row in read_steps(run_dir)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "ddp", "within", "stopped", "extended", "on-two"])
def test_learning_rates_are_those_of_torch(name, folder):
    rates = rates_of(folder / name)
    assert len(rates) == (28 if name in ("single", "ddp") else 20)
    expected = rates_of_torch(folder / name, "val_loss", "min", **OPTIONS)
    assert rates == pytest.approx(expected, rel=1e-12)
    assert len({*rates}) >= (2 if name in ("single", "ddp") else 3), "it is reduced"


@pytest.mark.slow
def test_learning_rates_follow_a_metric_of_which_high_values_are_good(folder):
    options = {"patience": 0, "threshold": 2.0, "cooldown": 1, "factor": 0.4}
    run = folder / "accuracy"
    expected = rates_of_torch(run, "val_accuracy", "max", min_lr=0.01, **options)
    assert rates_of(run) == pytest.approx(expected, rel=1e-12)
    assert rates_of(run)[-1] == pytest.approx(0.01)


@pytest.mark.slow
def test_warm_up_precedes_and_is_not_reduced(folder):
    rates = rates_of(folder / "warm")
    assert rates[:14] == pytest.approx([LR * (step + 1) / 15 for step in range(14)])
    options = OPTIONS | {"threshold": 0.99, "patience": 0}
    expected = rates_of_torch(folder / "warm", "val_loss", "min", begin=14, **options)
    assert rates[14:] == pytest.approx(expected[14:], rel=1e-12)
    in_warmup = rates_of_torch(folder / "warm", "val_loss", "min", **options)
    assert in_warmup[14] < LR, "the evaluations of the warm-up would have reduced it"


@pytest.mark.slow
def test_another_metric_begins_anew_after_a_resume(folder):
    run = folder / "other"
    assert "scheduler.metric: val_loss -> val_accuracy" in (run / "train.log").read_text()
    expected = rates_of_torch(run, "val_accuracy", "max", begin=17, **OPTIONS)
    factor = rates_of(run)[16] / expected[16]
    assert rates_of(run)[16:] == pytest.approx([factor * rate for rate in expected[16:]])


@pytest.mark.slow
def test_strategies_have_the_same_learning_rates(folder):
    assert rates_of(folder / "ddp") == rates_of(folder / "single")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stopped", "extended"])
def test_run_that_is_resumed_or_extended_equals_the_uninterrupted_one(name, folder):
    assert "resumed from" in (folder / name / "train.log").read_text()
    assert rates_of(folder / name) == rates_of(folder / "within")
    one, other = (newest(folder / each) for each in (name, "within"))
    assert one["progress"]["plateau"] == other["progress"]["plateau"]
    assert one["progress"]["plateau"]["factor"] < 0.1
    assert all(torch.equal(one["model"][key], other["model"][key]) for key in one["model"])
    losses = [[row["val_loss"] for row in read_metrics(folder / each)] for each in (name, "within")]
    # of the extended run the evaluation at its first end is a row, too
    assert losses[0][-1] == losses[1][-1]


@pytest.mark.slow
def test_run_that_is_resumed_on_two_ranks_has_the_same_learning_rates(folder):
    assert rates_of(folder / "on-two") == rates_of(folder / "within")


@pytest.mark.slow
def test_reduction_is_a_line_of_the_log(folder):
    log = (folder / "single" / "train.log").read_text()
    assert log.count("the learning rate is multiplied by 0.3, before by 1") == 1
    assert "scheduler=plateau: val_loss " in log


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("data.val_fraction=0", "scheduler.metric=val_loss: needs a validation set, which these"),
        (
            "scheduler.metric=val_mae",
            "scheduler.metric=val_mae: Classification has no such metric for these data; allowed: "
            "val_loss, val_accuracy, val_top5_accuracy",
        ),
        (
            "scheduler.metric=test_loss",
            "scheduler.metric=test_loss: must be a metric of the validation set, as val_loss",
        ),
        ("scheduler.factor=1.0", "scheduler.factor=1.0: must be a number above 0 and below 1"),
        ("scheduler.patience=-1", "scheduler.patience=-1: must be an integer of at least 0"),
        ("scheduler.mode=min", "scheduler.mode=min: there is no such key; allowed: scheduler.m"),
    ],
)
def test_what_cannot_work_is_refused(line, message):
    code, errors = refusal_in_world(f"{' '.join(SMALL)} {SETTINGS} {line}")
    assert (code, errors.count("error: ")) == (2, 1)
    assert f"error: {message}" in errors
