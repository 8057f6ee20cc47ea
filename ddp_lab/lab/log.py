"""What a Lab logs: lines on the console, metrics.jsonl and trackers, on rank 0."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ddp_lab.config.build import chosen_trackers
from ddp_lab.config.check import check_trackers
from ddp_lab.config.errors import ConfigError
from ddp_lab.observe.logger import Logger, scalars
from ddp_lab.observe.metrics_file import append_row
from ddp_lab.observe.trackers.background import Trackers
from ddp_lab.observe.trackers.base import Status, TrackedRun


class LabLogger(Logger):
    """The logger of a Lab and its trainers.

    Args:
        run_dir: the run directory; None: nothing is recorded.
        tracker, tracker_options: as the keys of train.py.
        config: the arguments of the Lab, for trackers.

    Attributes:
        is_main: whether this is rank 0, which alone prints and records.
        last_epoch: the metrics of the last epoch of `Trainer.fit`.

    Raises:
        ConfigError: the trackers cannot be constructed, or have no run directory.
    """

    def __init__(
        self,
        run_dir: Path | None,
        tracker: str | Sequence[str],
        tracker_options: Mapping[str, Any],
        config: dict[str, Any],
    ):
        check_trackers(tracker, tracker_options)
        self.run_dir = run_dir
        self.chosen = chosen_trackers(tracker, tracker_options)
        self.config = config
        if self.chosen and run_dir is None:
            raise ConfigError(
                f"tracker={tracker}: needs the directory of the run; use Lab(..., run_dir=DIR)"
            )
        self.trackers: Trackers | None = None
        self.is_main = True
        self.step = 0
        self.last = dict[str, Any]()
        self.last_epoch = dict[str, float]()

    def log(self, **metrics: Any) -> None:
        """Print and record a row: that of an epoch or of a step if it has such a value."""
        if not self.is_main:
            return
        values: dict[str, Any] = {
            name: value.item() if isinstance(value, torch.Tensor) else value
            for name, value in metrics.items()
        }
        shown = [
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in values.items()
        ]
        print(*shown, flush=True)

        if self.run_dir is None:
            return
        kind = next((name for name in ("epoch", "step") if name in values), "log")
        self.run_dir.mkdir(parents=True, exist_ok=True)
        append_row(self.run_dir / "metrics.jsonl", {"kind": kind, **values})

        epoch = values.get("epoch")
        self.step = values.get("step", max(self.step, epoch or 0))
        self.last = values
        if self.trackers is None:
            run = TrackedRun(self.run_dir, "", self.config, {}, start=(epoch or 0, self.step - 1))
            self.trackers = Trackers(self.chosen, run)
        self.trackers.log_metrics(scalars(values), self.step, epoch)

    def steps(self, row: Mapping[str, Any]) -> None:
        # with it, it would be the row of an epoch
        self.log(**{name: value for name, value in row.items() if name != "epoch"})

    def epoch(self, epoch: int, **metrics: float) -> None:
        self.last_epoch = metrics
        self.log(epoch=epoch, **metrics)

    def begin(self) -> None:
        """Begin a call of `fit`, which has no epoch yet."""
        self.last_epoch = {}

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        if self.trackers is not None:
            self.trackers.finish(status, summary)
            self.trackers = None
