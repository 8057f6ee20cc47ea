"""Learning-rate schedules: a shape over the whole run, counted in steps, behind an optional linear warm-up."""

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR


def constant(progress: float) -> float:
    return 1.0


def cosine(progress: float) -> float:
    """From 1 to 0 along half a cosine (Loshchilov and Hutter 2016, arXiv:1608.03983, one period)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def make_scheduler(
    optimizer: torch.optim.Optimizer, shape: Callable[[float], float], total_steps: int, warmup_steps: int
) -> LambdaLR:
    """Multiplies the learning rate by `shape(progress)`, progress from 0 to 1 over the steps that follow the warm-up."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return shape(min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))

    return LambdaLR(optimizer, factor)
