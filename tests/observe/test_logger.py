"""The records of a run: the log, metrics.jsonl, TensorBoard and pictures."""

import json
import logging
import resource
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from empty_pictures import drawn
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from worlds import run_world

from ddp_lab.config.build import chosen_trackers
from ddp_lab.observe.log import log, log_held, setup_logging
from ddp_lab.observe.logger import FileLogger
from ddp_lab.observe.metrics_file import append_row, describe_result, describe_steps
from ddp_lab.observe.trackers.background import Trackers
from ddp_lab.observe.trackers.base import TrackedRun

EPOCH = {  # all values differ
    "step": 7,
    "train_loss": 1.5,
    "train_accuracy": 0.25,
    "test_loss": float("nan"),
    "test_accuracy": 0.375,
    "lr": 0.5,
    "seconds": 2.0,
    "samples_per_second": 64.0,
}


@drawn()
def record_two_epochs(run_dir) -> None:
    setup_logging(run_dir, 0)
    trackers = Trackers(chosen_trackers("tensorboard", {}), TrackedRun(run_dir, "", {}, {}, (1, 0)))
    logger = FileLogger(run_dir, (1, 0), {"world_size": 2}, trackers, classes=["cat", "dog"])
    logger.epoch(1, **EPOCH)
    metrics = logger.metrics
    logger.metrics = Path("/dev/full")
    logger.epoch(1, **EPOCH)
    logger.metrics = metrics
    logger.epoch(
        2,
        **EPOCH
        | {"test_loss": 3.0, "test_top5_accuracy": 0.75, "val_loss": 4.0, "val_accuracy": 0.625},
    )
    shown = EventAccumulator(str(run_dir)).Reload().Scalars("accuracy/train")
    assert len(shown) == 3, "TensorBoard does not show a run while it trains"
    for epoch in (1, 2):
        logger.confusion(epoch, torch.tensor([[2, 2], [0, epoch]]))
    for epoch in (1, 9, 10, 20):
        logger.predictions(epoch, torch.rand(2, 1, 4, 4), torch.tensor([0, 1]), torch.eye(2))
    logger.pictures["missing.png"] = Path.read_text
    assert not list(run_dir.glob("*.png")), "pictures were drawn during the training"
    logger.close("finished", {"result": "good"})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """The directory of two epochs, of which the first one is recorded again on a full disk."""
    folder = tmp_path_factory.mktemp("recorded")
    run_world(1, record_two_epochs, folder)
    return folder


def test_epochs_are_recorded_in_strict_json_and_tensorboard(recorded):
    """JSON has no NaN."""

    def refuse(constant: str):
        pytest.fail(f"{constant} is no JSON")

    first, second = (
        json.loads(line, parse_constant=refuse)
        for line in (recorded / "metrics.jsonl").read_text().splitlines()
    )
    added = {"kind": "epoch", "world_size": 2}
    assert first == {"epoch": 1, **EPOCH, "test_loss": None, **added}
    validation = {"val_loss": 4.0, "val_accuracy": 0.625}
    assert second == {
        "epoch": 2,
        **EPOCH,
        "test_loss": 3.0,
        "test_top5_accuracy": 0.75,
        **validation,
        **added,
    }
    events = EventAccumulator(str(recorded), {"images": 0}).Reload()
    assert [image.step for image in events.Images("predictions")] == [1, 9, 10, 20]
    shown = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
    assert shown.pop("memory/peak_MiB") > 0
    assert shown == {
        "loss/train": 1.5,
        "loss/val": 4.0,
        "loss/test": 3.0,
        "accuracy/train": 0.25,
        "accuracy/val": 0.625,
        "accuracy/test": 0.375,
        "top5_accuracy/test": 0.75,
        "lr": 0.5,
        "speed/samples_per_second": 64.0,
        "speed/seconds": 2.0,
    }
    (image,) = events.Images("confusion")
    assert image.step == 2, "only the last confusion matrix is drawn"
    assert Image.open(recorded / "confusion.png").size == (image.width, image.height)


class Rows:
    """A tracker that keeps its rows, over several launches."""

    kept: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, run: TrackedRun):
        pass

    def log_metrics(self, metrics, step, epoch):
        self.kept.append((next(iter(metrics)), step))

    def finish(self, status, summary):
        pass


@drawn()
def record_in_two_launches(run_dir) -> list[tuple[str, int]]:
    """The first launch ends between its checkpoint of step 4 and the evaluation of its weights."""
    setup_logging(run_dir, 0)
    for start, steps in ((0, (2, 4)), (4, (6,))):
        chosen = {**chosen_trackers("tensorboard", {}), "rows": Rows}
        trackers = Trackers(chosen, TrackedRun(run_dir, "", {}, {}, (1, start)))
        logger = FileLogger(run_dir, (1, start), {}, trackers, ["cat", "dog"], evaluated_at=0)
        if start:
            logger.evaluation(1, start, val_loss=4.0)
        for step in steps:
            logger.steps({"epoch": 1, "step": step, "loss": float(step)})
        logger.close("preempted" if start == 0 else "finished", {})
    return Rows.kept


def test_evaluation_that_a_resumed_launch_repeats_reaches_the_trackers(tmp_path):
    (kept,) = run_world(1, record_in_two_launches, tmp_path)
    assert kept == [("step/loss", 2), ("step/loss", 4), ("loss/val", 4), ("step/loss", 6)]
    events = EventAccumulator(str(tmp_path / "steps")).Reload()
    assert [event.step for event in events.Scalars("loss/val")] == [4]
    assert [event.step for event in events.Scalars("step/loss")] == [2, 4, 6]


def test_line_of_an_epoch_has_its_seconds_and_its_rate(recorded):
    log_file = (recorded / "train.log").read_text()
    line = next(line for line in log_file.splitlines() if " INFO epoch 2: " in line)
    metrics = "train loss 1.5000 accuracy 0.2500 | val loss 4.0000 accuracy 0.6250 | test "
    assert f"epoch 2: {metrics}" in line
    assert line.endswith(" | lr 0.5, 2.00 s, 64 samples/s")


def test_line_of_steps_has_each_number_with_its_unit():
    row = {
        "epoch": 2,
        "step": 70,
        "loss": 0.12345,
        "accuracy": 0.75,
        "lr": 0.05,
        "samples_per_second": 12345.6,
        "data_wait": 0.125,
        "gradient_norm": 3.5,
        "mfu": 0.4321,
        "peak_memory_MiB": 2345.6,
        "eta_epoch": 61.0,
        "eta": 3723.0,
    }
    assert describe_steps(row) == (
        "loss 0.1235, accuracy 0.7500, gradient norm 3.5000, lr 0.05, 12,346 samples/s, 12% "
        "waiting for data, MFU 43.2%, 2,346 MiB, left: 01:01 of the epoch, 1:02:03 of the run"
    )


def test_full_disk_and_a_failing_picture_are_logged_and_do_not_end_the_run(recorded):
    full, missing = [
        line for line in (recorded / "train.log").read_text().splitlines() if "ERROR" in line
    ]
    assert full.endswith(
        "ERROR /dev/full could not be written (No space left on device): its records are "
        "incomplete; training continues"
    )
    assert f"ERROR {recorded}/missing.png could not be drawn (FileNotFoundError: " in missing
    assert Image.open(recorded / "curves.png").width > 1000, "the loss or the accuracy is missing"


def test_result_has_the_median_speed_of_the_epochs_on_the_same_number_of_devices(tmp_path):
    rows = [(1, 4, 9.0, 10.0), (2, 2, 1.0, 60.0), (3, 2, 2.0, 30.0), (4, 2, 3.0, 20.0)]
    lines = [
        {
            "epoch": epoch,
            "test_accuracy": epoch / 8,
            "world_size": ranks,
            "seconds": seconds,
            "samples_per_second": rate,
        }
        for epoch, ranks, seconds, rate in rows
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    text = describe_result(tmp_path / "metrics.jsonl", 2, 9, "val_loss", Path("best.pt"), "2 x cpu")
    assert (
        text
        == "result: epoch 2 (best val_loss), test accuracy 0.2500, 2.00 s/epoch, 30 samples/s on 2 "
        "x cpu (best.pt)"
    )
    assert (
        describe_result(tmp_path / "none", 1, 1, None, Path("a"), "cpu")
        == "result: epoch 1 (last), no metrics (a)"
    )


def test_row_that_does_not_fit_on_the_disk_is_not_written_in_part(tmp_path, caplog):
    metrics = tmp_path / "metrics.jsonl"
    append_row(metrics, {"a": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # the kernel writes up to this size, as on a disk with 3 bytes left
    resource.setrlimit(resource.RLIMIT_FSIZE, (12, hard))
    try:
        append_row(metrics, {"too": "long"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    append_row(metrics, {"b": float("nan")})
    assert metrics.read_text() == '{"a": 1}\n{"b": null}\n'
    assert (
        "(only 3 of 16 bytes were written): its records are incomplete; training continues"
        in caplog.text
    )


def log_as(run_dir, ranks: list[int]) -> None:
    for rank in ranks:
        with log_held() as early:
            log.info("before there is a directory")
        setup_logging(run_dir, rank)
        early.pass_on()
        log.info("all is well")
        logging.getLogger("somebody.else").info("chatter")
        log.warning("not quite")


def test_rank_0_logs_info_and_the_first_other_ranks_warnings_with_their_rank(tmp_path):
    run_world(1, log_as, tmp_path, [0, 7, 700])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.log", "train.rank7.log"]
    assert [
        line.split(" ", 2)[2] for line in (tmp_path / "train.log").read_text().splitlines()
    ] == [
        "INFO before there is a directory",
        "INFO all is well",
        "WARNING not quite",
    ]
    assert (tmp_path / "train.rank7.log").read_text().endswith("WARNING [rank 7] not quite\n")
    assert (tmp_path / "train.rank7.log").read_text().count("\n") == 1
