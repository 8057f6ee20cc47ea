"""Metrics that are not finite: each is said once, is never the best, and hides no other one."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from launches import main_in_world
from torch import nn
from torch.utils.data import TensorDataset
from worlds import run_world

from ddp_lab import Lab, tasks
from ddp_lab.commands import evaluate
from ddp_lab.training.loop import stop_reasons
from ddp_lab.training.metrics import Evaluation
from ddp_lab.training.not_finite import NotFiniteNotes
from ddp_lab.training.plan import FitSettings
from ddp_lab.training.progress import Progress

NAN = math.nan
INF = math.inf
NO_WEIGHT = (
    "no weight: all targets are ignored, so that there is no loss, and the metrics mean nothing. "
)


def position(*epochs: dict[str, float]) -> Progress:
    progress = Progress()
    for validation in epochs:
        progress = progress.evaluated(validation, tasks.Regression.lower_is_better).next_epoch()
    return progress


def test_metric_that_is_not_finite_hides_no_other():
    progress = position(
        {"val_loss": 3.0, "val_mae": 2.0, "val_r2": -INF},
        {"val_loss": 2.0, "val_mae": NAN, "val_r2": -INF},
        {"val_loss": INF, "val_mae": 1.0, "val_r2": NAN},
    )
    assert progress.best == {"val_loss": 2.0, "val_mae": 1.0}
    assert progress.best_epochs == {"val_loss": 2, "val_mae": 3}
    assert not stop_reasons(progress, FitSettings(9, patience=2))
    assert stop_reasons(progress, FitSettings(9, patience=3, criterion="val_r2")) == {
        "patience above 3": "none of the 3 epochs has a finite val_r2 that is kept as the best "
        "(patience=3)"
    }


def constant(split):
    """Return numbers; those to validate with are all the same, so that r2 is -inf."""
    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(len(split)))
    targets = inputs.sum(1, keepdim=True)
    return TensorDataset(inputs, torch.ones_like(targets) if split == "val" else targets)


def ignored(split):
    """Return tokens; those to validate and to test with are all to be ignored."""
    tokens = torch.arange(20 * 9).view(20, 9) % 11
    targets = tokens[:, 1:].clone()
    if split != "train":
        targets[:] = -100
    return TensorDataset(tokens[:, :-1], targets)


def linear(input_shape):
    return nn.Linear(*input_shape, 1)


BASE = [
    "epochs=3",
    "device=cpu",
    "batch_size=10",
    "scheduler=constant",
    "data=own",
    "data.num_workers=0",
    "model=own",
]
RUNS = {
    "constant": ["task=regression", "data.dataset._target_=test_not_finite.constant", "patience=2"],
    "never": [
        "task=regression",
        "data.dataset._target_=test_not_finite.constant",
        "checkpoint.best=val_r2",
    ],
    "ignored": [
        "task=tokens",
        "data.dataset._target_=test_not_finite.ignored",
        "data.num_classes=11",
        "data.test_split=test",
    ],
}
LINEAR = ["model._target_=test_not_finite.linear", "optimizer.lr=0.1"]
GPT = ["model=gpt", "model.depth=1", "model.width=8", "model.heads=2"]


def train_all(folder: Path) -> None:
    for name, overrides in RUNS.items():
        model = GPT if name == "ignored" else LINEAR
        main_in_world(*BASE, *overrides, *model, f"runs_dir={folder}", f"name={name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_world(1, train_all, folder)
    return folder


def rows_without_nan(run: Path) -> list[dict]:
    """Return the rows of metrics.jsonl, which must be valid JSON."""

    def fail(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [
        json.loads(line, parse_constant=fail)
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def test_run_with_a_metric_that_is_not_finite_keeps_its_best_checkpoint(folder):
    rows = rows_without_nan(folder / "constant")
    log = (folder / "constant" / "train.log").read_text()
    assert [row["val_r2"] for row in rows] == [None] * len(rows)
    best = min(rows, key=lambda row: row["val_loss"])
    state = torch.load(folder / "constant" / "checkpoints" / "best.pt", weights_only=True)
    assert state["progress"]["best"]["val_loss"] == pytest.approx(best["val_loss"])
    assert f"result: epoch {best['epoch']} (best val_loss)" in log
    assert (
        log.count(
            "WARNING not finite after epoch 1: val_r2 (-inf); such a value is never the best one"
        )
        == 1
    )
    assert log.count("not finite after") == 1


def test_best_by_a_metric_that_is_never_finite_is_the_last_epoch_which_is_said(folder):
    log = (folder / "never" / "train.log").read_text()
    said = (
        "val_r2 was not finite in any epoch, so that none is the best: the last weights are the "
        "result"
    )
    assert log.count(said) == 1
    assert "result: epoch 3 (last), " in log
    assert not (folder / "never" / "checkpoints" / "best.pt").exists()


def test_set_without_weight_is_said_once(folder, command, tmp_path, caplog):
    log = (folder / "ignored" / "train.log").read_text()
    assert log.count(f"WARNING the val set and the test set have {NO_WEIGHT}") == 1
    assert log.count(NO_WEIGHT) == 1
    assert "not finite after" not in log
    assert [row["val_loss"] for row in rows_without_nan(folder / "ignored")] == [None] * 3
    file = tmp_path / "found.json"
    code, output, errors = command(evaluate.main, folder / "ignored", "split=test", "--json", file)
    assert code == 0, output + errors
    assert caplog.text.count(f"the test set has {NO_WEIGHT}") == 1
    assert "NaN" not in file.read_text()
    assert json.loads(file.read_text())["test_loss"] is None


def test_lab_says_once_what_is_not_finite(caplog):
    train = constant("train")
    validation = constant("val")
    with Lab(device="cpu") as lab:
        trainer = lab.trainer(
            nn.Linear(3, 1), tasks.Regression(), partial(torch.optim.SGD, lr=0.1), batch_size=10
        )
        trainer.fit(train, validation, epochs=1)
        trainer.fit(train, validation, epochs=2)
        for _ in range(2):
            assert trainer.evaluate(validation)["r2"] == -INF
        assert trainer.progress.best_epochs["val_mae"] == 2
        assert caplog.text.count("not finite after epoch 1: val_r2 (-inf); such") == 1
        assert caplog.text.count("not finite: r2 (-inf)\n") == 1
        weightless = lab.trainer(
            nn.Linear(3, 1), without_weight, partial(torch.optim.SGD, lr=0.1), batch_size=10
        )
        for _ in range(2):
            assert math.isnan(weightless.evaluate(train)["loss"])
        assert caplog.text.count("the set that was evaluated has no weight") == 1
    assert caplog.text.count("not finite") == 2


def test_metrics_that_are_not_finite_are_one_message(caplog):
    notes = NotFiniteNotes(is_main=True)
    val = Evaluation({"loss": NAN, "mae": 1.0, "r2": -INF}, 3, {}, 3.0)
    test = Evaluation({"loss": INF, "mae": NAN, "r2": 1.0}, 3, {}, 3.0)
    notes.check({"val": val, "test": test}, " after epoch 2")
    listed = (
        "not finite after epoch 2: val_loss (nan), val_r2 (-inf), test_loss (inf), test_mae (nan); "
        "such a value"
    )
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith(listed)
    notes.check({"val": val, "test": test}, " after epoch 3")
    assert len(caplog.records) == 1
    notes.check({"val": Evaluation({"loss": NAN, "mae": NAN}, 3, {}, 3.0)}, " after epoch 4")
    assert caplog.records[1].message.startswith("not finite after epoch 4: val_mae (nan);")


def without_weight(outputs, targets):
    return (outputs - targets).square(), torch.zeros_like(outputs)
