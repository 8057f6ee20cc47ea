"""The position of a run: what a checkpoint holds besides tensors."""

from dataclasses import dataclass, field


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
    """

    epoch: int = 1
    samples: int = 0
    step: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    seconds: float = 0.0
    lr: float = 0.0
    best_loss: float | None = None
    best_epoch: int = 0

    def __str__(self) -> str:
        return f"epoch {self.epoch}, {self.samples:,} samples into it, step {self.step}"
