"""A run that resumes ends as one without an interruption, or begins, continues or refuses as the config says."""

import pytest
import torch
from checkpoints import assert_same, train
from launches import SMALL, read_metrics, refusal_in_world
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from worlds import run_world

from ddp_lab.training.loop import FitSettings, is_over, why_over
from ddp_lab.training.progress import Progress


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
    ],
)
def test_strategy_resumes_the_run_of_another(first, second, tmp_path):
    straight = train(tmp_path, "straight", "epochs=3")
    train(tmp_path, "moved", "epochs=1", f"strategy={first[0]}", ranks=first[1])
    moved = train(tmp_path, "moved", "epochs=3", f"strategy={second[0]}", ranks=second[1])
    assert_same(straight, moved, tolerance=1e-6)
    assert [record["world_size"] for record in read_metrics(tmp_path / "moved")] == [first[1], second[1], second[1]]


CHANGING = {"train.log", "status.json", ".launch", ".lock", "0.json"}  # files that every launch changes


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
    log = (tmp_path / "done" / "train.log").read_text()
    assert "nothing to do: 2 of epochs=2 are done; raise epochs to continue, or use another name" in log


@pytest.mark.parametrize(
    ("epochs", "patience", "expected"),
    [
        (6, None, "6 of epochs=6 are done; raise epochs to continue, or use another name"),
        (4, 9, "6 of epochs=4 are done; raise epochs to continue, or use another name"),
        (
            9,
            2,
            "the last 3 epochs had no val_loss below that of epoch 3 (patience=2); raise patience above 3 to continue, or use "
            "another name",
        ),
        (
            6,
            3,
            "6 of epochs=6 are done and the last 3 epochs had no val_loss below that of epoch 3 (patience=3); raise epochs "
            "and patience above 3 to continue, or use another name",
        ),
    ],
)
def test_remedy_for_a_run_that_is_over_names_what_ended_it(epochs, patience, expected):
    progress = Progress(epoch=7, best_epochs={"val_loss": 3}, stalled=3)
    settings = FitSettings(epochs, patience)
    assert is_over(progress, settings)
    assert why_over(progress, settings) == expected


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


def test_resume_with_another_seed_logs_a_warning(tmp_path):
    assert train(tmp_path, "run", "epochs=1", "seed=3")["seed"] == 3
    train(tmp_path, "run", "epochs=2", "seed=3")
    log = tmp_path / "run" / "train.log"
    assert "so the order of the samples changes" not in log.read_text()
    train(tmp_path, "run", "epochs=3", "seed=4")
    assert "WARNING seed=4: the checkpoint has seed=3, so the order of the samples changes from here on" in log.read_text()
