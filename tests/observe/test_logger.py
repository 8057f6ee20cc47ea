import inspect
import json
import resource
from itertools import combinations
from pathlib import Path

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from worlds import run_world

import ddp_lab.observe.logger
import ddp_lab.observe.metrics_file
from ddp_lab.observe.figure import pixels
from ddp_lab.observe.log import setup_logging
from ddp_lab.observe.logger import FileLogger, Logger
from ddp_lab.observe.metrics_file import append_line
from ddp_lab.observe.pictures import confusion_figure, prediction_grid
from ddp_lab.observe.plot import beside


def test_logger_and_file_logger_have_the_same_methods():
    def methods(kind: type) -> dict[str, list[str]]:
        functions = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(function).parameters) for name, function in functions if name[0] != "_"}

    assert methods(Logger) == methods(FileLogger)


def test_prediction_grid_shows_wrong_predictions_in_red_with_the_true_class():
    figure = prediction_grid(torch.rand(6, 1, 28, 28), [0] * 6, [0, 1] * 3, ["sandal", "boot"])
    below = [(axes.get_xlabel(), axes.xaxis.label.get_color()) for axes in figure.axes[:6]]
    assert below == [("sandal", "darkgreen"), ("boot\n(sandal)", "red")] * 3
    assert [len(axes.images) for axes in figure.axes] == [1] * 6 + [0] * 2


@pytest.mark.parametrize(
    ("count", "channels", "name"), [(1, 1, "cat"), (3, 3, "W" * 40), (8, 3, "a class of many words"), (20, 2, "cat")]
)
def test_prediction_grid_has_its_names_inside_the_picture(count, channels, name):
    figure = prediction_grid(torch.rand(count, channels, 20, 40), [0] * count, [1] * count, [name] * 2)
    height, width, _ = pixels(figure).shape
    boxes = [axes.xaxis.label.get_window_extent() for axes in figure.axes if axes.images]
    assert len(boxes) == min(count, 8)
    for box in boxes:
        assert 0 <= box.x0 < box.x1 <= width
        assert 0 <= box.y0 < box.y1 <= height
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


OPTIONS = {"start_epoch": 1, "start_step": 0, "steps_per_epoch": 8, "evaluated": ["val", "test"]}
OPTIONS |= {"hparams": {}, "config": "", "where": ""}


def write_to_a_full_disk(run_dir) -> None:
    setup_logging(run_dir, 0)
    logger = FileLogger(run_dir, **OPTIONS, constants={}, classes=[])
    metrics = dict.fromkeys(("train_loss", "train_accuracy", "test_loss", "test_accuracy", "lr", "seconds"), 1.0)
    for path in (run_dir / "metrics.jsonl", Path("/dev/full"), run_dir / "metrics.jsonl"):
        logger.metrics = path
        logger.epoch(1, **metrics, samples_per_second=1.0)


def test_full_disk_is_logged_and_training_continues(tmp_path):
    run_world(1, write_to_a_full_disk, tmp_path)
    message = "ERROR /dev/full could not be written (No space left on device): its records are incomplete; training continues"
    assert message in (tmp_path / "train.log").read_text()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def draw_and_fail(run_dir) -> None:
    ddp_lab.observe.metrics_file.beside = beside  # forked processes draw no curves (preload.py)
    setup_logging(run_dir, 0)
    logger = FileLogger(run_dir, **OPTIONS, constants={}, classes=[])
    metrics = dict.fromkeys(("train_loss", "train_accuracy", "test_accuracy", "lr", "seconds"), 1.0)
    for epoch, loss in ((1, float("nan")), (2, 1.0), (3, 0.5)):
        logger.epoch(epoch, **metrics, test_loss=loss, samples_per_second=1.0)
    logger.draw_at_close(lambda picture: picture.read_text(), run_dir / "missing.png")
    logger.draw_at_close(lambda picture: picture.write_text("drawn"), run_dir / "later.png")
    assert not list(run_dir.glob("*.png")), "pictures were drawn during the training"
    logger.close()


def test_line_that_does_not_fit_on_the_disk_is_not_written_in_part(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    append_line(metrics, "complete")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12, hard))  # the kernel writes up to this size, as on a disk with 3 bytes left
    try:
        with pytest.raises(OSError, match=r"^only 3 of 9 bytes were written$"):
            append_line(metrics, "too long")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert metrics.read_text() == "complete\n"
    append_line(metrics, "later")
    assert metrics.read_text() == "complete\nlater\n"


def test_close_draws_pictures_and_logs_those_that_fail(tmp_path):
    run_world(1, draw_and_fail, tmp_path)
    assert (tmp_path / "later.png").read_text() == "drawn"
    assert Image.open(tmp_path / "curves.png").width > 1000, "the loss or the accuracy is missing"
    assert f"ERROR {tmp_path}/missing.png could not be drawn (FileNotFoundError: " in (tmp_path / "train.log").read_text()
    assert (tmp_path / "train.log").read_text().count("ERROR") == 1


EPOCH = {  # all values differ
    "train_loss": 1.5,
    "train_accuracy": 0.25,
    "test_loss": float("nan"),
    "test_accuracy": 0.375,
    "lr": 0.5,
    "seconds": 2.0,
    "samples_per_second": 64.0,
}


def record_an_epoch(run_dir) -> None:
    ddp_lab.observe.logger.confusion_figure, ddp_lab.observe.logger.prediction_grid = confusion_figure, prediction_grid
    logger = FileLogger(run_dir, **OPTIONS, constants={"world_size": 2}, classes=["cat", "dog"])
    logger.epoch(1, **EPOCH)
    logger.epoch(2, **EPOCH | {"test_loss": 3.0, "test_top5_accuracy": 0.75, "val_loss": 4.0, "val_accuracy": 0.625})
    for epoch in (1, 2):
        logger.confusion(epoch, torch.tensor([[2, 2], [0, epoch]]))
    for epoch in (1, 9, 10, 11, 20, 99, 100, 110, 1000, 1100):
        logger.predictions(epoch, torch.rand(2, 1, 4, 4), torch.tensor([0, 1]), torch.eye(2))
    logger.close()


def test_epoch_is_recorded_under_its_names(tmp_path):
    """The epoch is recorded in strict JSON, which has no NaN, and in TensorBoard."""

    def refuse(constant: str):
        pytest.fail(f"{constant} is no JSON")

    run_world(1, record_an_epoch, tmp_path)
    first, second = (json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    added = {"kind": "epoch", "world_size": 2}
    assert first == {"epoch": 1, **EPOCH, "test_loss": None, **added}
    validation = {"val_loss": 4.0, "val_accuracy": 0.625}
    assert second == {"epoch": 2, **EPOCH, "test_loss": 3.0, "test_top5_accuracy": 0.75, **validation, **added}
    events = EventAccumulator(str(tmp_path), {"images": 0}).Reload()
    assert [image.step for image in events.Images("predictions")] == [1, 9, 10, 20, 100, 1000]
    shown = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
    assert shown.pop("memory/peak_MiB") > 0
    assert shown == {
        "loss/train": 1.5,
        "loss/val": 4.0,
        "loss/test": 3.0,
        "accuracy/train": 0.25,
        "accuracy/val": 0.625,
        "accuracy/test": 0.375,
        "accuracy/test_top5": 0.75,
        "lr": 0.5,
        "speed/samples_per_second": 64.0,
        "speed/step_ms": 250.0,
    }
    (image,) = events.Images("confusion")
    assert image.step == 2, "only the last confusion matrix is drawn"
    assert Image.open(tmp_path / "confusion.png").size == (image.width, image.height)
    assert (tmp_path / "classes.csv").read_text().split() == ["class,samples,correct,accuracy", "cat,4,2,0.5", "dog,2,2,1"]
