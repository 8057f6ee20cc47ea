"""The position of a run: what a checkpoint holds besides tensors."""

from dataclasses import dataclass, field
from typing import Literal

BestBy = Literal["test_loss", "test_accuracy"]  # the metric by which the best checkpoint is chosen


@dataclass
class Progress:
    """The position of a run.

    Attributes:
        epoch: epoch being trained, from 1.
        samples: samples of this epoch trained on so far, over all ranks: a multiple of the global batch size, or all samples.
        step: optimizer steps since the beginning of the run.
        sums: [loss_sum, correct, count] of this epoch's steps so far, over all ranks.
        seconds: duration of this epoch's steps so far.
        lr: learning rate of the last step.
        best_loss, best_epoch: lowest test loss so far, and its epoch; None and 0 before the first evaluation.
        best_accuracy, best_accuracy_epoch: highest test accuracy so far, and its epoch.
    """

    epoch: int = 1
    samples: int = 0
    step: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    seconds: float = 0.0
    lr: float = 0.0
    best_loss: float | None = None
    best_epoch: int = 0
    best_accuracy: float | None = None
    best_accuracy_epoch: int = 0

    def is_best(self, rule: BestBy | None) -> bool:
        """Return whether this is the end of the epoch with the lowest test loss, or the highest test accuracy, so far."""
        best = {"test_loss": self.best_epoch, "test_accuracy": self.best_accuracy_epoch, None: 0}[rule]
        return self.samples == 0 and 0 < best == self.epoch - 1

    def __str__(self) -> str:
        return f"epoch {self.epoch}, {self.samples:,} samples into it, step {self.step}"
