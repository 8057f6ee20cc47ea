"""The validation set: who is in it, what it chooses, and that the test set chooses nothing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from launches import ROOT, SMALL, main_in_world, read_metrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from worlds import run_world

from ddp_lab.commands import evaluate, export, predict
from ddp_lab.data.dataset import hold_out
from ddp_lab.data.datasets import Synthetic
from ddp_lab.observe.metrics_file import drop_rows, objective, read_epochs
from ddp_lab.run.trained import checkpoint_of
from ddp_lab.world.runtime import Runtime

# At this learning rate the epochs with the lowest val_loss and with the lowest test_loss differ.
RUN = [*SMALL, "data.dataset.train_size=125", "data.val_fraction=0.2", "model=lenet", "epochs=4"]
RUN += ["optimizer.lr=0.3", "scheduler=constant", "strategy=ddp", "name=mine"]


def test_validation_set_is_held_out_by_the_seed():
    whole = Synthetic(59, 7, 1, 6, 3).load()
    dataset = hold_out(whole, 0.2, seed=5)
    assert {name: data.size for name, data in dataset.sets.items()} == {
        "train": 47,
        "val": 12,
        "test": 7,
    }
    train, val, every = (
        {image.numpy().tobytes() for image in part.inputs}
        for part in (dataset.train, dataset.val, whole.train)
    )
    assert not train & val, "a validation image is trained on"
    assert train | val == every
    assert torch.equal(hold_out(whole, 0.2, seed=5).val.inputs, dataset.val.inputs)
    assert not torch.equal(hold_out(whole, 0.2, seed=6).val.inputs, dataset.val.inputs)
    assert hold_out(whole, 0, seed=5) is hold_out(whole, None, seed=5) is whole, (
        "the default trains on everything"
    )


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    """Return the directory of a run with a validation set, which two ranks of ddp trained."""
    folder = tmp_path_factory.mktemp("runs")
    run_world(2, main_in_world, *RUN, f"runs_dir={folder}")
    return folder / "mine"


def best_row(run: Path) -> dict:
    return min(read_metrics(run), key=lambda row: row["val_loss"])


def test_validation_set_chooses_the_best_epoch_and_the_test_set_does_not(chosen):
    rows = read_metrics(chosen)
    best = best_row(chosen)
    assert [(row["kind"], row["epoch"], row["step"]) for row in rows] == [
        ("epoch", n, 5 * n) for n in (1, 2, 3, 4)
    ]
    assert best["epoch"] not in (4, min(rows, key=lambda row: row["test_loss"])["epoch"]), (
        "the test compares nothing"
    )
    state = torch.load(chosen / "checkpoints" / "best.pt", weights_only=True)
    assert (state["progress"]["step"], state["progress"]["best"]["val_loss"]) == (
        best["step"],
        best["val_loss"],
    )
    summary = (chosen / "train.log").read_text().splitlines()[-1]
    assert (
        f"result: epoch {best['epoch']} (best val_loss), val loss {best['val_loss']:.4f} accuracy"
        in summary
    )
    assert f"| test loss {best['test_loss']:.4f} accuracy" in summary
    assert summary.endswith(f"({chosen}/checkpoints/best.pt)")
    sizes = (
        "training on 100 samples, validating on 25 held out by data.val_fraction=0.2 "
        "data.val_seed=0 of 125 samples, "
    )
    assert (chosen / "train.log").read_text().count(sizes) == 1
    events = EventAccumulator(str(chosen)).Reload()
    assert [event.value for event in events.Scalars("loss/val")] == pytest.approx(
        [row["val_loss"] for row in rows]
    )
    assert {"accuracy/val", "loss/test", "accuracy/test"} <= set(events.Tags()["scalars"])


@pytest.mark.covers("evaluate --checkpoint")
def test_commands_use_the_best_weights_and_name_their_file(
    chosen, command, tmp_path, caplog, monkeypatch
):
    best = best_row(chosen)
    file = f"{chosen}/checkpoints/best.pt"

    def run(main, *arguments) -> tuple[str, str]:
        code, output, errors = command(main, chosen, *arguments)
        assert code == 0, errors
        return output, errors

    for arguments, name in (((), "test"), (("split=test",), "test"), (("split=val",), "val")):
        output, errors = run(
            evaluate.main, "strategy=single", *arguments, "--json", tmp_path / "found.json"
        )
        metrics = f"{name} loss {best[f'{name}_loss']:.4f} accuracy {best[f'{name}_accuracy']:.4f}"
        assert output.startswith(f"{file}, epoch {best['epoch']}: {metrics} ")
        assert errors == ""
        assert (
            json.loads((tmp_path / "found.json").read_text())[f"{name}_accuracy"]
            == best[f"{name}_accuracy"]
        )
    assert f": {file}; input" in run(export.main, "--output", tmp_path / "model.safetensors")[0]
    assert (
        run(predict.main, ROOT / "docs" / "tensorboard.png", "--top=1")[1] == f"weights: {file}\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr("ddp_lab.observe.log.SLOW", 0)  # as if all took long
        last, errors = run(
            evaluate.main, "strategy=single", "--checkpoint=last", "--json", tmp_path / "found.json"
        )
    assert f"{chosen}/checkpoints/step_00000020.pt, epoch 4: " in last
    assert errors == "evaluating ...\n"
    loss = json.loads((tmp_path / "found.json").read_text())["test_loss"]
    assert loss == pytest.approx(read_metrics(chosen)[-1]["test_loss"], rel=1e-6)
    assert not caplog.text
    run(evaluate.main, "strategy=single", "split=val", "data.val_seed=1")
    assert "data.val_seed=1 of 125 samples: " in caplog.text
    assert "its weights may have been trained on samples that now validate them" in caplog.text


def test_result_of_the_log_is_that_of_the_commands(chosen, tmp_path):
    """A launch with nothing to do reports it, too, by its own criterion.

    That need not be the recorded one.
    """
    shutil.copytree(chosen, tmp_path / "mine")
    run_world(
        1, main_in_world, *RUN, "strategy=single", f"runs_dir={tmp_path}", "checkpoint.best=null"
    )
    *_, before, line = (tmp_path / "mine" / "train.log").read_text().splitlines()
    assert "nothing to do: " in before
    row = read_metrics(chosen)[-1]
    assert (
        f"result: epoch 4 (last), val loss {row['val_loss']:.4f} accuracy "
        f"{row['val_accuracy']:.4f} | test" in line
    )
    assert line.endswith(f"({checkpoint_of(tmp_path / 'mine', 'auto', Runtime('cpu'))})")


ROWS = [
    {"epoch": 1, "val_loss": 2.0, "val_accuracy": 0.1, "test_accuracy": 0.9},  # of an older version
    {"kind": "step", "epoch": 2, "step": 9, "loss": 7.0},
    {
        "kind": "epoch",
        "epoch": 2,
        "step": 10,
        "val_loss": 1.0,
        "val_accuracy": 0.4,
        "test_accuracy": 0.2,
    },
    {"kind": "step", "epoch": 3, "step": 11, "loss": 6.0},
    {"kind": "step", "epoch": 3, "step": 12, "loss": 5.0},
    {
        "kind": "epoch",
        "epoch": 3,
        "step": 15,
        "val_loss": None,
        "val_accuracy": 0.3,
        "test_accuracy": 0.3,
    },
]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"kind": "ep')
    return path


def test_resume_drops_the_rows_after_its_position(tmp_path):
    metrics = write_rows(tmp_path / "metrics.jsonl", ROWS)
    drop_rows(metrics, epoch=3, step=11)
    assert [json.loads(line) for line in metrics.read_text().splitlines()] == ROWS[:4]
    assert read_epochs(metrics) == [ROWS[0], ROWS[2]]


@pytest.mark.parametrize(
    ("choice", "value"),
    [
        ("auto", 1.0),
        ("val_loss", 1.0),
        ("val_accuracy", 0.4),
        ("test_accuracy", 0.3),
        ("test_loss", None),
    ],
)
def test_objective_is_the_best_validation_metric_or_the_last_test_accuracy(choice, value, tmp_path):
    assert objective(write_rows(tmp_path / "metrics.jsonl", ROWS), choice)[1] == value
    tested = [{"epoch": n, "test_accuracy": value} for n, value in ((1, 0.9), (2, 0.2))]
    assert objective(write_rows(tmp_path / "tested.jsonl", tested), "auto") == (
        "test_accuracy",
        0.2,
    )
    diverged = [
        {"epoch": n, "val_loss": value}
        for n, value in ((1, float("nan")), (2, 3.0), (3, float("nan")))
    ]
    assert objective(write_rows(tmp_path / "diverged.jsonl", diverged), "auto") == ("val_loss", 3.0)
    assert objective(write_rows(tmp_path / "lost.jsonl", diverged[:1]), "auto") == (
        "val_loss",
        None,
    )
    assert objective(tmp_path / "missing.jsonl", "auto") == ("test_accuracy", None)
