"""What `Lab.log` records: metrics.jsonl and trackers, on rank 0."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_lab.config.build import chosen_trackers
from ddp_lab.config.check import check_trackers
from ddp_lab.config.errors import ConfigError
from ddp_lab.observe.logger import scalars
from ddp_lab.observe.metrics_file import append_line
from ddp_lab.observe.trackers.background import Trackers
from ddp_lab.observe.trackers.base import TrackedRun


class LabLog:
    """The records of a Lab.

    Args:
        run_dir: the run directory; None: nothing is recorded.
        tracker, tracker_options: as the keys of train.py.
        config: the arguments of the Lab, for trackers.

    Raises:
        ConfigError: the trackers cannot be constructed, or have no run directory.
    """

    def __init__(
        self, run_dir: Path | None, tracker: str | Sequence[str], tracker_options: Mapping[str, Any], config: dict[str, Any]
    ):
        check_trackers(tracker, tracker_options)
        self.run_dir, self.chosen, self.config = run_dir, chosen_trackers(tracker, tracker_options), config
        if self.chosen and run_dir is None:
            raise ConfigError(f"tracker={tracker}: needs the directory of the run; use Lab(..., run_dir=DIR)")
        self.trackers: Trackers | None = None
        self.step, self.last = 0, dict[str, Any]()

    def append(self, values: dict[str, Any]) -> None:
        """Record a row, which is that of an epoch or of a step if it has a value of this name."""
        if self.run_dir is None:
            return
        kind = next((name for name in ("epoch", "step") if name in values), "log")
        self.run_dir.mkdir(parents=True, exist_ok=True)
        append_line(self.run_dir / "metrics.jsonl", json.dumps({"kind": kind, **values}))
        epoch = values.get("epoch")
        self.step, self.last = values.get("step", max(self.step, epoch or 0)), values
        if self.trackers is None:
            run = TrackedRun(self.run_dir, "", self.config, {}, start=(epoch or 0, self.step - 1))
            self.trackers = Trackers(self.chosen, run)
        self.trackers.log_metrics(scalars(values), self.step, epoch)

    def close(self, failed: bool) -> None:
        """End the records. The result is the last row."""
        if self.trackers is not None:
            self.trackers.finish("failed" if failed else "finished", {} if failed else self.last)
            self.trackers = None
