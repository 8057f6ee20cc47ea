"""Learning-rate schedules: an optional linear warm-up, then a shape over the remaining steps of the run."""

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR


def constant(progress: float) -> float:
    """Return the factor 1 at any progress."""
    return 1.0


def cosine(progress: float) -> float:
    """Return a factor that falls from 1 to 0 along half a cosine (Loshchilov and Hutter 2016, arXiv:1608.03983, one period)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def make_scheduler(
    optimizer: torch.optim.Optimizer, shape: Callable[[float], float], total_steps: int, warmup_steps: int
) -> LambdaLR:
    """Return a scheduler that multiplies the learning rate by a factor.

    In warm-up step s (from 0) the factor is (s + 1) / (warmup_steps + 1). After the warm-up it is `shape(progress)`.

    Args:
        shape: maps the progress to a factor; the progress is the fraction, 0 to 1, of the steps after the warm-up.
        total_steps: optimizer steps of the run, including the warm-up.
        warmup_steps: optimizer steps of the warm-up.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return shape(min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))

    return LambdaLR(optimizer, factor)
