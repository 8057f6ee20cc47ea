"""Runs on streams: limits, resumes of the same and of other worlds, evaluation, refusals."""

from pathlib import Path

import pytest
from checkpoints import assert_same
from launches import launch, main_in_world, newest, read_metrics, read_steps, refusal_in_world
from worlds import run_world

from ddp_lab.config.errors import ConfigError
from ddp_lab.data import stream
from ddp_lab.training.progress import Progress
from ddp_lab.training.stream_position import check_resumed

SMALL = [
    *("data=own", "data.mean=[0.5]", "data.std=[0.2]", "data.num_workers=0", "tracker=none"),
    *("model=simple_cnn", "batch_size=12", "optimizer.lr=0.01", "scheduler=constant"),
]
OF_ROWS = ("data.targets=label", "data.num_classes=10")


def run(run_dir: Path, dataset: str, *overrides: str, ranks: int = 1) -> dict:
    """Train, and return the newest checkpoint."""
    where = f"runs_dir={run_dir.parent}", f"name={run_dir.name}"
    target = f"data.dataset._target_=own_streams.{dataset}"
    run_world(ranks, main_with_states, *SMALL, *where, target, *overrides)
    return newest(run_dir)


def main_with_states(*overrides: str) -> str:
    """Run train.py with a state of the readers after every batch."""
    stream.STATE_SECONDS = 0.0
    return main_in_world(*overrides)


def log_of(run_dir: Path) -> str:
    return (run_dir / "train.log").read_text()


def test_run_is_one_epoch_that_a_limit_ends(tmp_path):
    run_dir = tmp_path / "run"
    saved = run(run_dir, "ending", "max_steps=10", "evaluate_every=4", "log_every=5")
    assert saved["progress"]["epoch"] == 1
    assert saved["progress"]["samples"] == 120
    assert [(row["epoch"], row["step"]) for row in read_metrics(run_dir)] == [(1, 10)]
    rows = read_steps(run_dir)
    assert all(row["eta_epoch"] == row["eta"] < 60 for row in rows)
    log = log_of(run_dir)
    assert "1 rank, global batch 12 = 1 x 12, a stream, lr 0.01" in log
    assert "training on a stream, validating on 31" in log
    assert "in the order in which the stream yields them. Each rank reads itself\n" in log
    assert "set checkpoint.every_steps or checkpoint.every_minutes for others" in log
    assert "step 8: val loss" in log
    assert "ended: max_steps=10 is reached at step 10" in log
    assert "nothing to do" not in log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "ranks", "strategy", "more"),
    [
        ("noisy", 1, "single", ()),
        ("stateful", 2, "ddp", ("data.readers=2", "ema=0.8")),
        ("stateful", 2, "pipeline", ()),
        pytest.param("noisy", 2, "fsdp", ("data.readers=2",), marks=pytest.mark.extra),
        pytest.param("stateful", 3, "scratch", ("data.readers=4",), marks=pytest.mark.extra),
        ("hugging_face", 2, "ddp", OF_ROWS),
    ],
)
def test_resumed_run_is_bitwise_as_one_without_an_end(dataset, ranks, strategy, more, tmp_path):
    line = (f"strategy={strategy}", "max_grad_norm=1.0", *more)
    if dataset == "hugging_face":
        line = (*line, "model=own", "model._target_=own_streams.OfImage")
    whole = run(tmp_path / "whole", dataset, *line, "max_steps=13", ranks=ranks)
    part = run(tmp_path / "part", dataset, *line, "max_steps=7", ranks=ranks)
    states = part["progress"]["stream"]["states"]
    assert bool(states) == (dataset != "noisy")
    resumed = run(tmp_path / "part", dataset, *line, "max_steps=13", ranks=ranks)
    assert_same(resumed, whole, 0.0)
    (row,), (expected,) = (read_metrics(tmp_path / name) for name in ("part", "whole"))
    assert row["train_loss"] == expected["train_loss"]
    assert row["val_loss"] == expected["val_loss"]


def test_resumed_run_begins_with_the_state_of_the_checkpoint(tmp_path, monkeypatch):
    part = run(tmp_path / "run", "stateful", "max_steps=2")
    (position,) = part["progress"]["stream"]["states"].values()
    assert position[:3] == [24, 0, 24]
    notes = tmp_path / "notes"
    monkeypatch.setenv("STREAM_NOTES", str(notes))
    run(tmp_path / "run", "stateful", "max_steps=3")
    first_of_launch, first_of_training, *_ = notes.read_text().split()
    assert (first_of_launch, first_of_training) == ("0", "24")


@pytest.mark.slow
def test_resume_in_another_world_continues_the_order(tmp_path):
    line = ("data.readers=2", "max_steps=9")
    whole = run(tmp_path / "whole", "stateful", *line)
    first = ("strategy=ddp", "data.readers=2", "max_steps=4")
    run(tmp_path / "part", "stateful", *first, ranks=2)
    assert_same(run(tmp_path / "part", "stateful", *line), whole, 1e-6)


@pytest.mark.slow
def test_killed_rank_is_started_again_and_the_result_is_the_same(tmp_path):
    common = [*SMALL, "strategy=ddp", "data.dataset._target_=own_streams.stateful", "max_steps=12"]
    common += ["data.num_workers=1", "data.readers=2", "checkpoint.every_steps=2"]
    command = "torchrun --nproc_per_node=2 --max-restarts=1 train.py"
    ends = {"killed": "inject=crash@rank=1,step=9", "whole": "inject=null"}
    for name, fault in ends.items():
        where = f"runs_dir={tmp_path}", f"name={name}"
        code, output = launch(command, *common, *where, fault)
        assert code == 0, output
    assert "resumed from" in log_of(tmp_path / "killed")
    assert_same(newest(tmp_path / "killed"), newest(tmp_path / "whole"), 0.0)


def test_stream_that_evaluates_counts_each_sample_once(tmp_path):
    run(tmp_path / "listed", "images", "max_steps=3")
    run(tmp_path / "ending", "ending", "max_steps=3")
    (listed,) = read_metrics(tmp_path / "listed")
    (ending,) = read_metrics(tmp_path / "ending")
    assert ending["val_loss"] == listed["val_loss"]
    assert ending["val_accuracy"] * 31 == pytest.approx(round(ending["val_accuracy"] * 31))


@pytest.mark.covers("data.readers")
def test_order_of_the_samples_depends_on_the_readers(tmp_path):
    one = run(tmp_path / "one", "images", "max_steps=4")
    three = run(tmp_path / "three", "images", "max_steps=4", "data.readers=3")
    assert one["model"].keys() == three["model"].keys()
    assert any(not tensor.equal(three["model"][name]) for name, tensor in one["model"].items())
    log = log_of(tmp_path / "three")
    assert "in the order of data.readers=3: sample i is from reader i % 3. A resume needs" in log


OF_IMAGES = "data.dataset._target_=own_streams.images"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "",
            f"{OF_IMAGES}: is a stream, which has no end, and epochs=20 does not end it: a stream "
            "has no epochs: it begins again at its end, and the run is one epoch. Set max_steps, "
            "max_tokens or max_minutes, and leave epochs out",
        ),
        ("epochs=2", f"{OF_IMAGES}: is a stream, which has no end, and epochs=2 does not end it"),
        ("max_steps=9 epochs=2", "epochs=2: a stream has no epochs"),
        ("max_steps=9 patience=2", "patience=2: a stream has no epochs"),
        ("max_steps=9 warmup_epochs=0.5", "warmup_epochs=0.5: a stream has no epochs"),
        (
            "max_steps=9 scheduler=multi_step scheduler.milestones=[1]",
            "scheduler._target_=ddp_lab.training.schedule.multi_step: is a function of the epoch",
        ),
        ("max_steps=9 data.loader=device", "data.loader=device: holds a complete dataset, but"),
        (
            "max_steps=9 data.val_fraction=0.2",
            "data.val_fraction=0.2: chooses samples by number, of which a stream has no end",
        ),
        ("max_steps=9 data.val_split=null", "the dataset: is a stream, of which no samples can be"),
        ("max_steps=9 data.flip=true", "data.crop_padding=0, data.flip=true: are drawn for all"),
        ("max_steps=9 data.readers=0", "data.readers=0: must be an integer of at least 1"),
        (
            "max_steps=9 data.readers=2 data.dataset._target_=own_streams.whole",
            "data.readers=2: data.dataset._target_=own_streams.whole has no method shard",
        ),
        (
            "max_steps=9 data.readers=2 data.dataset._target_=own_datasets.Shapes",
            "data.readers=2: is for a stream, an IterableDataset, but own_datasets.Shapes is",
        ),
        ("max_tokens=9", "max_tokens=9: the samples of this dataset are no tokens"),
    ],
)
def test_keys_that_a_stream_does_not_support_are_refused(line, message):
    code, errors = refusal_in_world(f"{' '.join(SMALL)} {OF_IMAGES} {line}")
    assert code == 2
    assert f"error: {message}" in errors
    assert errors.count("error:") == 1


def test_stream_that_divides_itself_by_rank_is_refused():
    target = "data.dataset._target_=own_streams.by_rank max_steps=9 strategy=ddp"
    ended = run_world(2, refusal_in_world, f"{' '.join(SMALL)} {target}")
    assert [code for code, _ in ended] == [2, 2]
    assert "the dataset: the first sample of the stream, or the size of another set" in ended[0][1]


@pytest.mark.parametrize(
    ("before", "readers", "message"),
    [
        (2, 4, "data.readers=4: the checkpoint is of a run with data.readers=2, which has another"),
        (
            0,
            1,
            "resume: the checkpoint is of a run on a map-style dataset, and this one is on a st",
        ),
        (1, 0, "resume: the checkpoint is of a run on a stream, and this one is on a map-style da"),
    ],
)
def test_checkpoint_with_another_order_is_refused(before, readers, message):
    position = Progress(step=5, samples=60, stream={"readers": before} if before else {})
    with pytest.raises(ConfigError, match=message):
        check_resumed(position, readers)
    check_resumed(Progress(), readers)
    check_resumed(position, before)


def test_run_that_resumes_with_other_readers_is_refused(tmp_path):
    run(tmp_path / "run", "images", "max_steps=2")
    where = f"runs_dir={tmp_path} name=run"
    line = f"{' '.join(SMALL)} {OF_IMAGES} {where} max_steps=4 data.readers=2"
    code, errors = refusal_in_world(line)
    assert code == 2
    assert "data.readers=2: the checkpoint is of a run with data.readers=1" in errors
