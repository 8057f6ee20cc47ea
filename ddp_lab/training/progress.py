"""Where a run stands: what a checkpoint remembers beside the tensors."""

from dataclasses import dataclass, field


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        epoch: the one being trained, from 1.
        samples: of it that are trained on, all ranks together: a multiple of the batch size, or all.
        step: optimizer steps taken since the beginning of the run.
        sums: [loss_sum, correct, count] of this epoch's steps so far, over all ranks.
        seconds: that these steps took.
        lr: of the last of them.
        best_loss, best_epoch: of the evaluations so far.
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
