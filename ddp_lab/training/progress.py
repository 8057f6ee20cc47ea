"""The position of a run: what a checkpoint holds besides tensors."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ddp_lab.config.errors import count

# the metric of the validation set by which the best checkpoint is chosen, for example val_loss
Criterion = str


@dataclass
class Progress:
    """The position of a run.

    Attributes:
        epoch: epoch being trained, from 1.
        samples: samples of this epoch trained on so far, over all ranks: a multiple of the global
            batch size, or all samples.
        step: optimizer steps since the beginning of the run.
        averaged_from: the step after which the averages of the weights (ema) begin: 0, or that of a
            checkpoint without them, from which the run was resumed.
        sums: [loss_sum, *task.train_metrics, weight] of this epoch's steps so far, over all ranks;
            empty at its beginning.
        recorded: the sums at the last recorded row of this epoch; empty before the first one.
        seconds: duration of this epoch's steps so far.
        lr: learning rate of the last step.
        best: best value of each metric of the validation set so far, by name, for example val_loss;
            empty without such a set.
        best_epochs: their epochs.
        best_steps: the steps after which they were computed.
        evaluated_at: the step after which the last evaluation was.
        trained: duration of the steps of the epochs before this one.
        joules: energy of the GPUs of the run so far, evaluations included, in those launches that
            could read it.
        minutes_passed: the value of max_minutes for which the ranks have agreed that so much time
            has passed; 0: they have not.
        horizon: number of steps after which a schedule ends whose run max_minutes ends, predicted
            once from the speed; 0: not yet.
        horizon_minutes: the value of max_minutes for which it was predicted.
        horizon_batch_size: the global batch size of the steps until then. 0: unknown, in a
            checkpoint of an older version.
        horizon_is_timed: whether steps of this batch size were timed. Otherwise it follows from the
            samples of another one, until they are.
        plateau: state of scheduler=plateau, by name: its factor and metric, and that of torch's
            ReduceLROnPlateau; empty before the first evaluation, and with other schedules.
        stream: of a run on a stream the number of its "readers", and their positions in "states",
            which save reading: `samples` says where the run is. Empty on a map-style dataset.
        first_order: number of the order of the first epoch, as `Loader.set_epoch` takes it: 0 in a
            run that a loop in a Lab began, else 1. None: a checkpoint of an older version, which
            does not say who began the run.
    """

    epoch: int = 1
    samples: int = 0
    step: int = 0
    averaged_from: int = 0
    sums: list[float] = field(default_factory=list[float])
    recorded: list[float] = field(default_factory=list[float])
    seconds: float = 0.0
    lr: float = 0.0
    best: dict[str, float] = field(default_factory=dict[str, float])
    best_epochs: dict[str, int] = field(default_factory=dict[str, int])
    best_steps: dict[str, int] = field(default_factory=dict[str, int])
    evaluated_at: int = 0
    trained: float = 0.0
    joules: float = 0.0
    minutes_passed: float = 0.0
    horizon: int = 0
    horizon_minutes: float = 0.0
    horizon_batch_size: int = 0
    horizon_is_timed: bool = True
    plateau: dict[str, Any] = field(default_factory=dict[str, Any])
    stream: dict[str, Any] = field(default_factory=dict[str, Any])
    first_order: int | None = 1

    @property
    def order(self) -> int:
        """The number of the order of this epoch's samples, as `Loader.set_epoch` takes it."""
        return self.epoch - 1 + (1 if self.first_order is None else self.first_order)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "Progress":
        """Return the position in a checkpoint.

        Older versions chose the best by the test set: that choice is left out.
        """
        known = {each.name for each in fields(cls)}
        values = {key: value for key, value in saved.items() if key in known}
        values.setdefault("first_order", None)
        return cls(**values)

    @property
    def seconds_trained(self) -> float:
        """The duration of all steps so far."""
        return self.trained + self.seconds

    @property
    def evaluated_epoch(self) -> int:
        """The epoch after which, or within which, the last evaluation was, if this is after it."""
        return self.epoch - (self.samples == 0)

    def next_epoch(self) -> "Progress":
        """Return the position at the beginning of the next epoch."""
        return replace(
            self,
            epoch=self.epoch + 1,
            samples=0,
            sums=[],
            recorded=[],
            seconds=0.0,
            lr=0.0,
            trained=self.seconds_trained,
        )

    def evaluated(
        self, validation: Mapping[str, float], lower_is_better: Callable[[str], bool]
    ) -> "Progress":
        """Return the position after an evaluation, with what is the best so far.

        A metric that is not finite is no better one.

        Args:
            validation: the metrics val_*; none without a validation set.
            lower_is_better: as `Task.lower_is_better`.
        """
        following = replace(self, evaluated_at=self.step)
        better = {
            name: value
            for name, value in validation.items()
            if math.isfinite(value)
            and self._is_better(name, value, lower_is_better(name.removeprefix("val_")))
        }
        following.best = self.best | better
        following.best_epochs = self.best_epochs | dict.fromkeys(better, self.epoch)
        following.best_steps = self.best_steps | dict.fromkeys(better, self.step)
        return following

    def _is_better(self, name: str, value: float, lower: bool) -> bool:
        return name not in self.best or (
            value < self.best[name] if lower else value > self.best[name]
        )

    def stalled(self, criterion: Criterion) -> int:
        """Return how many epochs in a row were not better than an earlier one, by a metric."""
        return self.epoch - 1 - self.best_epochs.get(criterion, 0)

    def is_best(self, criterion: Criterion | None) -> bool:
        """Return whether this is after the evaluation that is the best so far."""
        name = criterion or ""
        if name in self.best_steps:
            return self.best_steps[name] == self.step
        # a checkpoint of an older version, which evaluated after complete epochs only
        return self.samples == 0 and 0 < self.best_epochs.get(name, 0) == self.epoch - 1

    def without_best(self, criterion: Criterion) -> "Progress":
        """Return this position without the best by a metric, so that the next epoch is the best."""
        return replace(
            self, best={name: value for name, value in self.best.items() if name != criterion}
        )

    def __str__(self) -> str:
        return f"epoch {self.epoch}, {count(self.samples, 'sample')} into it, step {self.step}"
