"""Regression: numbers as targets."""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F

from ddp_lab.tasks.base import Losses, Task, require_same_shape


class Regression(Task):
    """Regression: one or more numbers for each sample.

    Outputs and targets have the same shape, [b, ...]. The loss is the squared error of each number.
    Metrics are `mae` and `rmse`, in the unit of the targets, and `r2`, which is 1 for perfect
    outputs.

    Args:
        loss: as in `Task`.
    """

    takes_logits = True
    metric_mode: ClassVar = {"mae": "lower", "rmse": "lower", "r2": "higher"}

    def loss_fn(self, outputs: torch.Tensor, targets: torch.Tensor) -> Losses:
        require_same_shape(outputs, targets)
        return F.mse_loss(outputs, targets, reduction="none")

    def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = outputs.double()
        targets = targets.double()
        error = outputs - targets
        values = {
            "absolute": error.abs(),
            "squared": error.square(),
            "target": targets,
            "target_squared": targets.square(),
        }
        return {name: value.sum() for name, value in values.items()} | {
            "elements": error.new_tensor(error.numel())
        }

    def metrics(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        count = sums["elements"]
        squared = sums["squared"]
        # About the mean of all targets; float64 keeps enough digits of the difference unless the
        # mean is 1e6 deviations.
        variation = sums["target_squared"] - sums["target"].square() / count
        values = {
            "mae": sums["absolute"] / count,
            "rmse": (squared / count).sqrt(),
            "r2": 1 - squared / variation,
        }
        return {name: float(value) for name, value in values.items()}
