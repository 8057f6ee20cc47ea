"""A run that resumes ends as one without an interruption, or begins or refuses by the config."""

from pathlib import Path

import pytest
import torch
from checkpoints import assert_same, train
from launches import SMALL, read_metrics, refusal_in_world
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from worlds import run_world

from ddp_lab.training.loop import stop_reasons
from ddp_lab.training.plan import FitSettings
from ddp_lab.training.progress import Progress

# files that every launch changes
CHANGING = {"train.log", "status.json", ".launch", ".lock", "0.json"}


def contents(folder: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in CHANGING
    }


def test_finished_run_is_not_changed(tmp_path):
    train(tmp_path, "done", "epochs=2")
    before = contents(tmp_path / "done")
    (tmp_path / "done" / "data.json").unlink()  # as in runs of older versions
    train(tmp_path, "done", "epochs=2")
    assert contents(tmp_path / "done") == before
    log = (tmp_path / "done" / "train.log").read_text()
    assert (
        "nothing to do: 2 of epochs=2 are done; raise epochs to continue, or use another name"
        in log
    )


NOT_BELOW = "the last 3 epochs had no better val_loss than epoch 3"


@pytest.mark.parametrize(
    ("epochs", "patience", "expected"),
    [
        (4, 9, {"epochs": "6 of epochs=4 are done"}),
        (9, 2, {"patience above 3": f"{NOT_BELOW} (patience=2)"}),
        (
            6,
            3,
            {"epochs": "6 of epochs=6 are done", "patience above 3": f"{NOT_BELOW} (patience=3)"},
        ),
        (9, 4, {}),
    ],
)
def test_remedy_for_a_run_that_is_over_names_what_ended_it(epochs, patience, expected):
    progress = Progress(epoch=7, best_epochs={"val_loss": 3})
    assert stop_reasons(progress, FitSettings(epochs, patience)) == expected


def test_run_without_its_last_checkpoint_ends_the_same(tmp_path):
    """This is the state after a kill between the metrics and the checkpoint of the last epoch.

    The schedule spans the run.
    """
    overrides = "epochs=3", "scheduler=cosine", "warmup_epochs=0.5"
    straight = train(tmp_path, "cut", *overrides)
    records = read_metrics(tmp_path / "cut")
    (tmp_path / "cut" / "checkpoints" / "step_00000015.pt").unlink()
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "train_l')
    assert_same(straight, train(tmp_path, "cut", *overrides), tolerance=0)
    again = read_metrics(tmp_path / "cut")
    assert [record["epoch"] for record in again] == [1, 2, 3]
    rates = [record["lr"] for record in records]
    assert [record["lr"] for record in again] == rates
    assert 0.01 > rates[0] > rates[1] > rates[2] > 0
    events = EventAccumulator(str(tmp_path / "cut")).Reload()
    assert [event.step for event in events.Scalars("loss/test")] == [1, 2, 3]


def test_resume_from_a_path_continues_there_and_removes_later_checkpoints_and_metrics(tmp_path):
    train(tmp_path, "old", "epochs=2")
    train(tmp_path, "run", "epochs=5")
    path = tmp_path / "old" / "checkpoints" / "step_00000010.pt"
    continued = train(tmp_path, "run", "epochs=3", f"resume={path}")
    assert [file.name for file in sorted((tmp_path / "run" / "checkpoints").glob("step_*.pt"))] == [
        "step_00000015.pt"
    ]
    assert [record["epoch"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3]
    assert_same(continued, train(tmp_path, "new", "epochs=3", f"resume={path}"), tolerance=0)
    assert [record["epoch"] for record in read_metrics(tmp_path / "new")] == [3]
    assert (
        "config/text_summary" in EventAccumulator(str(tmp_path / "new")).Reload().Tags()["tensors"]
    )


@pytest.mark.slow
def test_momentum_may_be_added_and_removed_on_resume(tmp_path):
    """SGD without momentum has no state."""
    for epochs, momentum in enumerate((0, 0.9, 0), 1):
        overrides = f"epochs={epochs}", f"optimizer.momentum={momentum}", "model=lenet"
        moved = train(tmp_path, "moved", *overrides, "strategy=fsdp", ranks=2)
        one = train(tmp_path, "one", *overrides)
        for name, tensor in one["model"].items():
            assert torch.allclose(tensor, moved["model"][name], rtol=0, atol=1e-6), (name, momentum)


GROUPED = "optimizer.groups=[{match: '*.bias', lr_scale: 3}, {match: conv1.*, momentum: 0.5}]"


@pytest.mark.slow
def test_resumed_run_keeps_its_groups_and_takes_over_other_ones(tmp_path):
    """Two ranks have one stage of the model each, and so other parameters of each group."""
    lenet = ("model=lenet", "float64")  # in float32 it depends on the processor if they are equal
    train(tmp_path, "moved", "epochs=1", *lenet, GROUPED, "strategy=pipeline", ranks=2)
    moved = train(tmp_path, "moved", "epochs=2", *lenet, GROUPED)
    straight = train(tmp_path, "straight", "epochs=2", *lenet, GROUPED)
    assert moved["model"]["conv2.0.weight"].dtype == torch.float64
    assert_same(moved, straight, tolerance=1e-12)
    rates = [group["lr"] for group in moved["optimizer"]["param_groups"]]
    assert rates == [0.01, 0.03, 0.01]
    names = [group["params"] for group in moved["optimizer"]["param_groups"]]
    assert [len(each) for each in names] == [3, 4, 1], names

    other = train(tmp_path, "moved", "epochs=3", *lenet, "optimizer.layer_decay=0.5")
    rates = [group["lr"] for group in other["optimizer"]["param_groups"]]
    assert rates == pytest.approx([0.01, 0.005, 0.0025, 0.00125])
    log = (tmp_path / "moved" / "train.log").read_text()
    assert "optimizer.layer_decay: null -> 0.5" in log


def test_another_batch_size_keeps_the_position_in_the_schedule(tmp_path):
    """The schedule is halfway after half of the epochs, not after half of the steps."""
    train(tmp_path, "moved", "epochs=2", "scheduler=cosine", "batch_size=4")
    train(tmp_path, "moved", "epochs=4", "scheduler=cosine", "batch_size=50")
    train(tmp_path, "straight", "epochs=4", "scheduler=cosine", "batch_size=50")
    moved, straight = (
        [record["lr"] for record in read_metrics(tmp_path / name)] for name in ("moved", "straight")
    )
    assert moved[2:] == pytest.approx(straight[2:])
    assert moved[2] > 0.001


def test_new_options_of_the_optimizer_apply_after_a_resume_and_a_new_seed_is_warned_of(tmp_path):
    train(tmp_path, "mine", "epochs=2")
    log = tmp_path / "mine" / "train.log"
    moved = train(tmp_path, "mine", "epochs=3", "optimizer.lr=0.02", "optimizer.momentum=0.5")
    assert [group["momentum"] for group in moved["optimizer"]["param_groups"]] == [0.5]
    assert "so the order of the samples changes" not in log.read_text()
    train(tmp_path, "mine", "epochs=4", "seed=4")
    assert [record["lr"] for record in read_metrics(tmp_path / "mine")] == [0.01, 0.01, 0.02, 0.01]
    assert (
        "WARNING seed=4: the checkpoint has seed=0, so the order of the samples changes from here "
        "on" in log.read_text()
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optimizer=adamw",
            "step_00000010.pt: was written with another optimizer: its options are ",
        ),
        ("resume=never", "already contains a run. Choose another name"),
    ],
)
def test_launch_that_cannot_resume_a_run_is_refused_and_does_not_change_it(
    override, message, tmp_path
):
    train(tmp_path, "mine", "epochs=2")
    before = (tmp_path / "mine" / "metrics.jsonl").read_text()
    line = [*SMALL, "scheduler=constant", f"runs_dir={tmp_path}", "name=mine", "epochs=3", override]
    ((code, printed),) = run_world(1, refusal_in_world, " ".join(line))
    assert code == 2
    assert message in printed
    assert (tmp_path / "mine" / "metrics.jsonl").read_text() == before
