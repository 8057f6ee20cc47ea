"""What a run says and writes: the console and train.log, metrics.jsonl, TensorBoard. Rank 0 does; the others keep silent."""

import json
import logging
import math
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ddp_lab.observe.plot import Curve, beside, curves
from ddp_lab.observe.prediction_grid import prediction_grid

log = logging.getLogger("ddp_lab")


class LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: the disk is full, and the console has the line."""


@contextmanager
def surviving_a_full_disk(path: Path) -> Iterator[None]:
    """Records are worth less than the training: what is lost of them is said."""
    try:
        yield
    except OSError as error:
        log.error(f"{path} could not be written ({error.strerror or error}): records are missing there; training goes on")


def setup_logging(run_dir: Path, rank: int) -> None:
    """Rank 0: INFO and above to stdout and train.log. The others: warnings and errors, with their rank, to stderr and
    train.rank<N>.log, which exists only if there was one."""
    name = f"[rank {rank}] " if rank else ""
    console = logging.StreamHandler(sys.stderr if rank else sys.stdout)
    console.setFormatter(logging.Formatter(f"{name}%(message)s"))
    file = LogFile(run_dir / (f"train.rank{rank}.log" if rank else "train.log"), delay=True)
    file.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {name}%(message)s"))
    logging.basicConfig(handlers=[console, file], level=logging.WARNING, force=True)
    log.setLevel(logging.WARNING if rank else logging.INFO)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # a first picture's warnings are about its font cache
    logging.captureWarnings(True)


def peak_memory_bytes() -> int:
    """The most that any one GPU of this process had allocated; without GPUs, the most memory this process had resident."""
    if torch.cuda.is_initialized():
        return max(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Logger:
    """Has all methods and writes nothing: what ranks other than 0 hold."""

    def progress(self, batches: Iterable, label: str, done: int, total: int) -> Iterable:
        """The batches, and on a terminal a bar of how many of `total` are done."""
        return batches

    def epoch(self, epoch: int, **metrics: float) -> None:
        """One epoch's record, `metrics` as metrics.jsonl has them."""

    def predictions(self, epoch: int, inputs: torch.Tensor, targets: torch.Tensor, logits: torch.Tensor) -> None:
        """A picture of a few test images with what the model takes them for."""

    def text(self, title: str, markdown: str) -> None:
        """Words for TensorBoard's page of texts."""

    def draw_at_close(self, draw: Callable[[Path], None], picture: Path) -> None:
        """Call `draw(picture)` when the logger is closed: importing matplotlib and drawing take over a second of training."""

    def summary(self, accuracy: float, seconds: float, samples_per_second: float) -> None:
        """The line that closes a run."""

    def close(self) -> None:
        pass


class FileLogger(Logger):
    """Rank 0's.

    Args:
        start_epoch: the first epoch of this launch; what an interrupted launch wrote from it on is dropped.
        constants: fields that every record of metrics.jsonl ends with.
        hparams: for TensorBoard's HParams page.
        config: the resolved config as YAML.
        where: the devices, in words.
        steps_per_epoch: to derive the time of a step.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        start_epoch: int,
        constants: dict[str, Any],
        hparams: dict[str, Any],
        config: str,
        classes: list[str],
        where: str,
        steps_per_epoch: int,
    ):
        from torch.utils.tensorboard import SummaryWriter  # takes 2 s, which only rank 0 needs to spend
        from torch.utils.tensorboard.summary import hparams as hparams_summary

        self.constants, self.classes, self.where, self.steps_per_epoch = constants, classes, where, steps_per_epoch
        self.metrics = run_dir / "metrics.jsonl"
        self.pictures: list[tuple[Callable[[Path], None], Path]] = []
        drop_epochs(self.metrics, start_epoch)
        is_new = not list(run_dir.glob("events.*"))
        self.board = SummaryWriter(run_dir, purge_step=None if is_new else start_epoch)
        if is_new:
            self.board.add_text("config", f"```yaml\n{config}\n```")
            # add_hparams would open a second run beside this one.
            for summary in hparams_summary(hparams, {"accuracy/test": 0.0, "loss/test": 0.0}):
                self.board.file_writer.add_summary(summary)

    def progress(self, batches: Iterable, label: str, done: int, total: int) -> Iterable:
        # disable=None: only on a terminal
        return tqdm(batches, label, total=total, initial=done, unit="step", leave=False, disable=None)

    def epoch(self, epoch: int, **metrics: float) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}  # JSON has no NaN
        with surviving_a_full_disk(self.metrics):
            append_line(self.metrics, json.dumps({"epoch": epoch, **finite, **self.constants}))
        with surviving_a_full_disk(self.metrics.parent):
            for part in ("train", "test"):
                self.board.add_scalar(f"loss/{part}", metrics[f"{part}_loss"], epoch)
                self.board.add_scalar(f"accuracy/{part}", metrics[f"{part}_accuracy"], epoch)
            self.board.add_scalar("lr", metrics["lr"], epoch)
            self.board.add_scalar("speed/samples_per_second", metrics["samples_per_second"], epoch)
            self.board.add_scalar("speed/step_ms", 1000 * metrics["seconds"] / self.steps_per_epoch, epoch)
            self.board.add_scalar("memory/peak_MiB", peak_memory_bytes() / 2**20, epoch)
            self.board.flush()
        log.info(
            f"epoch {epoch}: train loss {metrics['train_loss']:.4f} accuracy {metrics['train_accuracy']:.4f} | "
            f"test loss {metrics['test_loss']:.4f} accuracy {metrics['test_accuracy']:.4f} | "
            f"lr {metrics['lr']:.4g}, {metrics['seconds']:.2f} s, {metrics['samples_per_second']:,.0f} samples/s"
        )

    def predictions(self, epoch, inputs, targets, logits) -> None:
        grid = prediction_grid(inputs.cpu(), targets.tolist(), logits.argmax(1).tolist(), self.classes)
        with surviving_a_full_disk(self.metrics.parent):
            self.board.add_image("predictions", grid, epoch)

    def text(self, title: str, markdown: str) -> None:
        with surviving_a_full_disk(self.metrics.parent):
            self.board.add_text(title, markdown)

    def draw_at_close(self, draw: Callable[[Path], None], picture: Path) -> None:
        self.pictures.append((draw, picture))

    def summary(self, accuracy: float, seconds: float, samples_per_second: float) -> None:
        log.info(
            f"test accuracy {accuracy:.4f}, {seconds:.2f} s/epoch, {samples_per_second:,.0f} samples/s on {self.where} "
            f"({self.metrics.parent})"
        )

    def close(self) -> None:
        with surviving_a_full_disk(self.metrics.parent):
            self.board.close()
        self.draw_at_close(partial(draw_metrics, self.metrics), self.metrics.with_name("curves.png"))
        for draw, picture in self.pictures:
            try:
                draw(picture)
            except Exception as error:  # no picture is worth a failed run
                log.error(f"{picture} could not be drawn ({type(error).__name__}: {error}); the run itself is not affected")


def draw_metrics(metrics: Path, picture: Path) -> None:
    """Draw the run's losses and accuracies by epoch; nothing where there are none yet."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    plots = []
    for kind in ("loss", "accuracy") if records else ():
        lines = []
        for part in ("train", "test"):
            points = [(r["epoch"], r[f"{part}_{kind}"]) for r in records if r[f"{part}_{kind}"] is not None]
            lines += [Curve(part, points)] if points else []
        plots += [curves(f"{metrics.parent.name}: {kind}", "epoch", kind, lines, zero=kind == "loss")] if lines else []
    if plots:
        beside(plots, picture)


def append_line(path: Path, line: str) -> None:
    """The whole of it or, where the disk is full, nothing.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        size, text = os.fstat(descriptor).st_size, f"{line}\n".encode()
        if (written := os.write(descriptor, text)) < len(text):
            os.truncate(descriptor, size)
            raise OSError(f"{written} of {len(text)} bytes had room")
    finally:
        os.close(descriptor)


def drop_epochs(metrics: Path, start_epoch: int) -> None:
    """Removes the records from `start_epoch` on, written after the checkpoint that the run goes on from, the last one
    perhaps in half."""
    if metrics.exists():
        whole = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
        rest = metrics.with_suffix(".tmp")
        rest.write_text("".join(line for line in whole if json.loads(line)["epoch"] < start_epoch))
        rest.replace(metrics)
