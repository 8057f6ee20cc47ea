"""The records of a run, which rank 0 writes: log, metrics.jsonl, pictures and trackers."""

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from ddp_lab.config.types import SETS
from ddp_lab.observe.log import log
from ddp_lab.observe.metrics_file import (
    OF_STEP,
    STRAGGLER,
    append_row,
    describe_metrics,
    describe_steps,
    draw_metrics,
    drop_rows,
    is_epoch,
    read_rows,
)
from ddp_lab.observe.pictures import confusion_figure, prediction_grid
from ddp_lab.observe.plot import pixels, write
from ddp_lab.world.device import peak_memory_bytes

if TYPE_CHECKING:
    from ddp_lab.observe.trackers.background import Trackers
    from ddp_lab.observe.trackers.base import Status

BAR = 1.0  # seconds from one set of numbers of a bar to the next
LINE = 10.0  # seconds from one line in a file to the next
FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
PLACES = ("epoch", "step", "eta", "eta_epoch")  # fields of a row that are no metrics
# other names that trackers get
NAMES = {
    "samples_per_second": "speed/samples_per_second",
    "seconds": "speed/seconds",
    "energy_kWh": "energy/kWh",
    "joules_per_sample": "energy/joules_per_sample",
}


class Logger:
    """A logger that writes nothing, for all ranks but 0.

    As a context manager it is closed as failed by an exception.

    Attributes:
        show_every: seconds from one call of `show` to the next.
        draws_predictions: whether `predictions` does anything, so that a prediction for it is worth
            its time.
    """

    show_every = math.inf
    draws_predictions = False

    def __enter__(self) -> "Logger":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.close("failed", {})

    def bar(
        self, label: str, done: int, total: int | None
    ) -> AbstractContextManager[Callable[[], object] | None]:
        """Show a progress bar during the body, on a terminal.

        The body gets what advances it by a step; None: there is no bar.

        Args:
            label: text in front of the bar.
            done: number of steps already taken.
            total: number of steps in all; None: not known.
        """
        return nullcontext()

    def steps(self, row: Mapping[str, Any]) -> None:
        """Write the record of some steps within an epoch, the fields of metrics.jsonl.

        `step` is the last of these steps.
        """

    def show(self, row: Mapping[str, Any]) -> None:
        """Show such a record, which is not kept, after the progress bar or as a line of the log."""

    def epoch(self, epoch: int, **metrics: float) -> None:
        """Write the record of one epoch.

        `metrics` are the fields of metrics.jsonl; `seconds` is the time of its steps.
        """

    def evaluation(self, epoch: int, step: int, **metrics: float) -> None:
        """Write the record of an evaluation within an epoch.

        Args:
            epoch, step: the last ones of the training.
            metrics: as the fields of metrics.jsonl.
        """

    def straggler(self, row: Mapping[str, Any]) -> None:
        """Write the record of a rank that has become slow, or has recovered."""

    def predictions(
        self, epoch: int, inputs: torch.Tensor, targets: torch.Tensor, logits: torch.Tensor
    ) -> None:
        """Write a picture of a few images with the model's predictions.

        Args:
            epoch: number of the epoch.
            inputs: float [n, channels, height, width].
            targets: int64 [n].
            logits: float [n, classes].
        """

    def confusion(self, epoch: int, counts: torch.Tensor | None, name: str = "test") -> None:
        """Keep the confusion matrix of an evaluation.

        The last one is drawn when the logger is closed.

        Args:
            epoch: number of the epoch.
            counts: int64 [classes, classes], a row per true class; None if there are too many
                classes.
            name: of the set, val or test.
        """

    def text(self, title: str, markdown: str) -> None:
        """Pass a text to the trackers."""

    def close(self, status: "Status", summary: Mapping[str, Any]) -> None:
        """Draw the pictures, unless the run has failed, and end the trackers.

        The arguments are those of `Tracker.finish`.
        """


class FileLogger(Logger):
    """The logger of rank 0.

    Args:
        run_dir: directory for metrics.jsonl and the pictures.
        start: first epoch of this launch, and number of steps before it. Rows after this position,
            from an interrupted launch, are removed.
        constants: fields to append to every record of metrics.jsonl.
        trackers: get the metrics and the pictures, and of the rows before `start` those that they
            lack; None: there is none.
        classes: names of the classes.
        evaluated_at: the step of the last evaluation before `start`; None: that of `start`.
    """

    def __init__(
        self,
        run_dir: Path,
        start: tuple[int, int],
        constants: dict[str, Any],
        trackers: "Trackers | None",
        classes: list[str],
        evaluated_at: int | None = None,
    ):
        self.constants = constants
        self.trackers = trackers
        self.classes = classes
        self.metrics = run_dir / "metrics.jsonl"
        self.step = start[1]
        self.pictures: dict[str, Callable[[Path], None]] = {
            "curves.png": partial(draw_metrics, self.metrics)
        }
        self._bar: tqdm[Any] | None = None  # on a terminal
        drop_rows(self.metrics, *start, evaluated_at)
        self.show_every = LINE
        for row in read_rows(self.metrics):
            if row.get("kind") == STRAGGLER:  # no metric, which trackers would draw
                continue
            self._track({key: value for key, value in row.items() if key not in constants})

    @property
    def draws_predictions(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.trackers is not None and self.trackers.is_used

    @contextmanager
    def bar(
        self, label: str, done: int, total: int | None
    ) -> Generator[Callable[[], object] | None]:
        # disable=None shows the bar only on a terminal
        bar = tqdm(
            desc=label, total=total, initial=done, leave=False, disable=None, bar_format=FORMAT
        )
        on_terminal = not bar.disable
        self.show_every = BAR if on_terminal else LINE
        self._bar = bar if on_terminal else None
        try:
            yield bar.update if on_terminal else None
        finally:
            bar.close()

    def show(self, row: Mapping[str, Any]) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(describe_steps(row), refresh=False)
        else:
            log.info(f"epoch {row['epoch']}, step {row['step']}: {describe_steps(row)}")

    def steps(self, row: Mapping[str, Any]) -> None:
        self._record({"kind": "step", **row})

    def _record(self, row: Mapping[str, Any], **more: float) -> None:
        append_row(self.metrics, {**row, **self.constants})
        self._track(row, **more)

    def _track(self, row: Mapping[str, Any], **more: float) -> None:
        self.step = int(row.get("step", 0))  # a row of an earlier version may have none
        if self.trackers is None:
            return
        self.trackers.log_metrics(
            scalars(row) | more, self.step, row["epoch"] if is_epoch(row) else None
        )

    def epoch(self, epoch: int, **metrics: float) -> None:
        self._record(
            {"kind": "epoch", "epoch": epoch, **metrics},
            **{"memory/peak_MiB": peak_memory_bytes() / 2**20},
        )
        log.info(
            f"epoch {epoch}: {describe_metrics(metrics)} | lr {metrics['lr']:.4g}, "
            f"{metrics['seconds']:.2f} s, {metrics['samples_per_second']:,.0f} samples/s"
        )

    def evaluation(self, epoch: int, step: int, **metrics: float) -> None:
        self._record({"kind": "evaluation", "epoch": epoch, "step": step, **metrics})
        log.info(f"epoch {epoch}, step {step}: {describe_metrics(metrics, SETS[1:])}")

    def straggler(self, row: Mapping[str, Any]) -> None:
        append_row(self.metrics, {"kind": STRAGGLER, **row, **self.constants})

    def predictions(
        self, epoch: int, inputs: torch.Tensor, targets: torch.Tensor, logits: torch.Tensor
    ) -> None:
        if self.trackers is None:
            return
        grid = prediction_grid(
            inputs.cpu(), targets.tolist(), logits.argmax(1).tolist(), self.classes
        )
        self.trackers.log_media("predictions", pixels(grid), self.step, epoch)

    def confusion(self, epoch: int, counts: torch.Tensor | None, name: str = "test") -> None:
        if counts is not None:
            draw = partial(self._draw_confusion, epoch, counts.long(), name)
            self.pictures["confusion.png"] = draw

    def _draw_confusion(self, epoch: int, counts: torch.Tensor, name: str, path: Path) -> None:
        set_name = {"val": "validation set", "test": "test set"}[name]
        title = f"{self.metrics.parent.name}: {set_name}, epoch {epoch}"
        image = write(confusion_figure(counts, self.classes, title), path)
        if self.trackers is not None:
            self.trackers.log_media("confusion", image, self.step, epoch)

    def text(self, title: str, markdown: str) -> None:
        if self.trackers is not None:
            self.trackers.log_media(title, markdown, self.step, 0)

    def close(self, status: "Status", summary: Mapping[str, Any]) -> None:
        # Not before: importing matplotlib and drawing take over a second.
        for name, draw in self.pictures.items() if status != "failed" else ():
            picture = self.metrics.with_name(name)
            try:
                draw(picture)
            except Exception as error:  # a picture that fails must not fail the run
                log.error(
                    f"{picture} could not be drawn ({type(error).__name__}: {error}); the run "
                    "itself is not affected"
                )
        if self.trackers is not None:
            self.trackers.finish(status, summary)


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return what trackers get of a row of metrics.jsonl: its numbers.

    Of an evaluation, val_loss is called loss/val; of a step, loss is called step/loss.
    """
    values: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, (int, float)) and key not in PLACES:
            name, _, kind = key.partition("_")
            of_epoch = f"{kind}/{name}" if name in SETS and kind else NAMES.get(key, key)
            values[f"{OF_STEP}{key}" if row.get("kind") == "step" else of_epoch] = value
    return values
