"""Evaluations within an epoch: their rows, the best weights, and what they leave as it was."""

from pathlib import Path

import pytest
import torch
from checkpoints import assert_same, start, train
from launches import SMALL, main_in_world, newest, read_metrics, refusal_in_world
from worlds import run_world

from ddp_lab.observe.metrics_file import read_rows

# 80 of the 100 samples are trained on, in 10 steps of 8
LINE = ("data.val_fraction=0.2", "batch_size=8", "evaluate_test=end", "epochs=2")
EVERY = "evaluate_every=4"


def evaluations(run_dir: Path) -> list[dict]:
    rows = read_rows(run_dir / "metrics.jsonl")
    return [row for row in rows if row["kind"] == "evaluation"]


def test_validation_set_is_evaluated_every_n_steps_which_changes_nothing_else(tmp_path):
    run_dir = tmp_path / "run"
    with_evaluations = train(tmp_path, "run", *LINE, EVERY)
    without = train(tmp_path, "other", *LINE)
    assert_same(with_evaluations, without, 0.0)
    places = [(row["epoch"], row["step"]) for row in evaluations(run_dir)]
    assert places == [(1, 4), (1, 8), (2, 12), (2, 16)]  # not after 20, the end of an epoch
    for row, expected in zip(read_metrics(run_dir), read_metrics(tmp_path / "other"), strict=True):
        assert row["val_loss"] == expected["val_loss"]
        assert row["train_loss"] == expected["train_loss"]
    log = (run_dir / "train.log").read_text()
    value = evaluations(run_dir)[0]["val_loss"]
    assert f"epoch 1, step 4: val loss {value:.4f} accuracy" in log


def test_evaluated_loss_is_that_of_a_run_that_ends_there(tmp_path):
    train(tmp_path, "run", *LINE, EVERY, "ema=0.5")
    train(tmp_path, "ends", *LINE, "max_steps=12", "ema=0.5")
    row = evaluations(tmp_path / "run")[2]
    last = read_metrics(tmp_path / "ends")[-1]
    assert row["step"] == last["step"] == 12
    assert (row["val_loss"], row["val_accuracy"]) == (last["val_loss"], last["val_accuracy"])


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "ddp"),
        *(pytest.param(2, name, marks=pytest.mark.slow) for name in ("fsdp", "pipeline")),
        pytest.param(3, "scratch", marks=pytest.mark.slow),
    ],
)
def test_evaluations_within_epochs_are_the_same_for_any_ranks(ranks, strategy, tmp_path):
    line = (*LINE, EVERY, "batch_size=12")
    train(tmp_path, "one", *line)
    start(tmp_path / "several", ranks, (*line, f"strategy={strategy}"))
    rows = zip(evaluations(tmp_path / "several"), evaluations(tmp_path / "one"), strict=True)
    for row, expected in rows:
        assert (row["epoch"], row["step"]) == (expected["epoch"], expected["step"])
        assert row["val_loss"] == pytest.approx(expected["val_loss"], abs=1e-5)


@pytest.mark.parametrize(
    "step", [4, *(pytest.param(step, marks=pytest.mark.slow) for step in (3, 5))]
)
def test_run_that_is_preempted_near_an_evaluation_has_each_row_once(step, tmp_path):
    train(tmp_path, "whole", *LINE, EVERY)
    line = (*SMALL, *LINE, EVERY, "scheduler=constant", f"runs_dir={tmp_path}", "name=run")
    with pytest.raises(SystemExit):
        main_in_world(*line, f"inject=sigterm@rank=0,step={step}")
    main_in_world(*line)
    resumed, expected = (
        [(row["step"], row["val_loss"]) for row in evaluations(tmp_path / name)]
        for name in ("run", "whole")
    )
    assert resumed == expected
    assert_same(newest(tmp_path / "run"), newest(tmp_path / "whole"), 0.0)
    best, whole = (
        torch.load(tmp_path / name / "checkpoints/best.pt", weights_only=True)["progress"]
        for name in ("run", "whole")
    )
    assert best["best_steps"] == whole["best_steps"]


def test_weights_within_an_epoch_are_kept_as_the_best(tmp_path):
    # with this learning rate the loss becomes larger again within the first epoch
    run_world(
        1,
        main_in_world,
        *SMALL,
        *LINE,
        "evaluate_every=1",
        "optimizer.lr=0.5",
        "scheduler=constant",
        f"runs_dir={tmp_path}",
        "name=run",
        "epochs=1",
    )
    run_dir = tmp_path / "run"
    rows = [*evaluations(run_dir), *read_metrics(run_dir)]
    best = min(rows, key=lambda row: row["val_loss"])
    assert best["kind"] == "evaluation"
    progress = torch.load(run_dir / "checkpoints/best.pt", weights_only=True)["progress"]
    assert progress["step"] == best["step"]
    assert progress["best"]["val_loss"] == best["val_loss"]
    log = (run_dir / "train.log").read_text()
    assert (
        f"result: epoch 1, step {best['step']} (best val_loss), val loss {best['val_loss']:.4f}"
        in log
    )


def test_nothing_to_evaluate_is_refused():
    code, errors = refusal_in_world(f"{' '.join(SMALL)} evaluate_every=2 evaluate_test=end")
    assert code == 2
    assert "error: evaluate_every=2: there is no validation set, and evaluate_test=end" in errors


@pytest.mark.slow
def test_checkpoint_is_written_every_n_minutes(tmp_path):
    line = (*SMALL, "data.dataset.train_size=20000", "max_minutes=0.06", "epochs=1")
    minutes = ("checkpoint.every_minutes=0.01", "checkpoint.keep=99", "evaluate_test=end")
    run_world(2, main_in_world, *line, *minutes, "strategy=ddp", f"runs_dir={tmp_path}", "name=run")
    steps = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step_*.pt"))
    assert 2 <= len(steps) <= 8  # the last one, and at most six by time in 3.6 s
