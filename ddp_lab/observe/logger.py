"""The records of a run, which rank 0 writes: a line of the log per epoch, metrics.jsonl, TensorBoard and pictures."""

import json
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch

from ddp_lab.config.types import SETS
from ddp_lab.observe.log import log
from ddp_lab.observe.metrics_file import append_line, describe_metrics, draw_metrics, drop_rows
from ddp_lab.observe.pictures import confusion_figure, prediction_grid
from ddp_lab.observe.progress import Display
from ddp_lab.world.device import peak_memory_bytes

T = TypeVar("T")


@contextmanager
def surviving_a_full_disk(path: Path) -> Generator[None]:
    """Log an OSError as an error instead of raising it: missing records must not end the training."""
    try:
        yield
    except OSError as error:
        log.error(f"{path} could not be written ({error.strerror or error}): its records are incomplete; training continues")


class Logger:
    """A logger that writes nothing, for all ranks but 0."""

    def progress(self, batches: Iterable[T], label: str, done: int, total: int) -> Iterable[T]:
        """Return the batches. On a terminal, iterating over them shows a progress bar.

        Args:
            batches: the batches to iterate over.
            label: text in front of the bar.
            done: number of steps already taken.
            total: number of steps in all.
        """
        return batches

    def steps(self, row: Mapping[str, Any]) -> None:
        """Write the record of some steps within an epoch, the fields of metrics.jsonl; `step` is the last of them."""

    def show(self, row: Mapping[str, Any]) -> None:
        """Show such a record, which is not kept, on the console. `show_every` is the number of seconds between two of them."""

    @property
    def show_every(self) -> float:
        return math.inf

    def epoch(self, epoch: int, **metrics: float) -> None:
        """Write the record of one epoch. `metrics` are the fields of metrics.jsonl; `seconds` is the time of its steps."""

    def predictions(self, epoch: int, inputs: torch.Tensor, targets: torch.Tensor, logits: torch.Tensor) -> None:
        """Write a picture of a few images with the model's predictions.

        After 9 epochs only every tenth one has a picture, after 99 only every hundredth, and so on.

        Args:
            epoch: number of the epoch.
            inputs: float [n, channels, height, width].
            targets: int64 [n].
            logits: float [n, classes].
        """

    def confusion(self, epoch: int, counts: torch.Tensor | None) -> None:
        """Keep the confusion matrix of an evaluation. The last one is drawn when the logger is closed.

        Args:
            epoch: number of the epoch.
            counts: int64 [classes, classes], a row per true class; None if there are too many classes.
        """

    def text(self, title: str, markdown: str) -> None:
        """Write a text to TensorBoard's text page."""

    def close(self) -> None:
        """Write the buffered records and draw the pictures."""


class FileLogger(Logger):
    """The logger of rank 0.

    Args:
        run_dir: directory for metrics.jsonl and TensorBoard's event file.
        start: first epoch of this launch, and number of steps before it. Rows after this position, from an interrupted launch,
            are removed.
        constants: fields to append to every record of metrics.jsonl.
        hparams: fields of TensorBoard's HParams page.
        config: the resolved config as YAML.
        classes: names of the classes.
    """

    def __init__(
        self,
        run_dir: Path,
        start: tuple[int, int],
        constants: dict[str, Any],
        hparams: dict[str, Any],
        config: str,
        classes: list[str],
    ):
        from torch.utils.tensorboard import SummaryWriter  # takes 2 s, so only rank 0 imports it
        from torch.utils.tensorboard.summary import hparams as hparams_summary

        self.constants, self.classes = constants, classes
        self.metrics = run_dir / "metrics.jsonl"
        self.pictures: dict[str, Callable[[Path], None]] = {"curves.png": partial(draw_metrics, self.metrics)}
        drop_rows(self.metrics, *start)
        self.display = Display()
        # A run of its own: in one with the epochs, resuming from an epoch would remove the steps with a higher number.
        self.open_step_board = partial(SummaryWriter, str(run_dir / "steps"), purge_step=start[1] + 1)
        self.step_board: SummaryWriter | None = None
        is_new = not list(run_dir.glob("events.*"))
        self.board = SummaryWriter(str(run_dir), purge_step=None if is_new else start[0])
        if is_new:
            self.board.add_text("config", f"```yaml\n{config}\n```")
            writer = self.board.file_writer
            assert writer is not None, "an open SummaryWriter has a FileWriter"
            # SummaryWriter.add_hparams would add a second run to TensorBoard.
            for summary in hparams_summary(
                hparams, {f"{kind}/{name}": 0.0 for kind, name in product(("loss", "accuracy"), SETS)}
            ):
                writer.add_summary(summary)

    def progress(self, batches: Iterable[T], label: str, done: int, total: int) -> Iterable[T]:
        return self.display.batches(batches, label, done, total)

    def show(self, row: Mapping[str, Any]) -> None:
        self.display.show(row)

    @property
    def show_every(self) -> float:
        return self.display.every

    def steps(self, row: Mapping[str, Any]) -> None:
        self._append("step", row)
        with surviving_a_full_disk(self.metrics.parent):
            self.step_board = self.step_board or self.open_step_board()
            for name, value in row.items():
                if name not in ("epoch", "step", "eta", "eta_epoch"):
                    self.step_board.add_scalar(f"step/{name}", value, row["step"])
            self.step_board.flush()

    def _append(self, kind: str, metrics: Mapping[str, Any]) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}  # JSON has no NaN
        with surviving_a_full_disk(self.metrics):
            append_line(self.metrics, json.dumps({"kind": kind, **finite, **self.constants}))

    def epoch(self, epoch: int, **metrics: float) -> None:
        self._append("epoch", {"epoch": epoch, **metrics})
        scalars = {"lr": metrics["lr"], "speed/samples_per_second": metrics["samples_per_second"]}
        scalars["memory/peak_MiB"] = peak_memory_bytes() / 2**20
        for key, value in metrics.items():  # val_loss becomes loss/val
            name, _, kind = key.partition("_")
            scalars |= {f"{kind}/{name}": value} if name in SETS else {}
        with surviving_a_full_disk(self.metrics.parent):
            for tag, value in scalars.items():
                self.board.add_scalar(tag, value, epoch)
            self.board.flush()
        log.info(
            f"epoch {epoch}: {describe_metrics(metrics)} | "
            f"lr {metrics['lr']:.4g}, {metrics['seconds']:.2f} s, {metrics['samples_per_second']:,.0f} samples/s"
        )

    def predictions(self, epoch: int, inputs: torch.Tensor, targets: torch.Tensor, logits: torch.Tensor) -> None:
        if epoch % 10 ** (len(str(epoch)) - 1) != 0:
            return  # a picture takes 0.1 s, and TensorBoard shows ten of a run
        grid = prediction_grid(inputs.cpu(), targets.tolist(), logits.argmax(1).tolist(), self.classes)
        with surviving_a_full_disk(self.metrics.parent):
            self.board.add_figure("predictions", grid, epoch)

    def confusion(self, epoch: int, counts: torch.Tensor | None) -> None:
        if counts is not None:
            self.pictures["confusion.png"] = partial(self._draw_confusion, epoch, counts.long())

    def _draw_confusion(self, epoch: int, counts: torch.Tensor, path: Path) -> None:
        figure = confusion_figure(counts, self.classes)
        figure.savefig(path)
        self.board.add_figure("confusion", figure, epoch)

    def text(self, title: str, markdown: str) -> None:
        with surviving_a_full_disk(self.metrics.parent):
            self.board.add_text(title, markdown)

    def close(self) -> None:
        for name, draw in self.pictures.items():  # not before: importing matplotlib and drawing take over a second
            picture = self.metrics.with_name(name)
            try:
                draw(picture)
            except Exception as error:  # a picture that fails must not fail the run
                log.error(f"{picture} could not be drawn ({type(error).__name__}: {error}); the run itself is not affected")
        with surviving_a_full_disk(self.metrics.parent):
            self.board.close()
            if self.step_board:
                self.step_board.close()
