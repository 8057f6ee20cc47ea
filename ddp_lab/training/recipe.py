"""How a model is trained: what its optimizer, its schedule and its steps are made of."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.optim.lr_scheduler import LambdaLR

from ddp_lab.training.performance import PerformanceOptions
from ddp_lab.training.step import StepOptions


@dataclass(frozen=True)
class Recipe:
    """How the weights are updated.

    Attributes:
        batch_size: samples in the GLOBAL batch; divisible by the number of replicas.
        optimizer: makes the optimizer of some parameters.
        scheduler: makes its learning-rate schedule.
        step: what a step does, and the seed.
        ema: decay of averages of the weights; None: no averages.
        ema_warmup: whether this decay warms up.
        decay_norms_and_biases: as in `param_groups`.
        performance: how a step is executed.
    """

    batch_size: int
    optimizer: Callable[..., torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], LambdaLR]
    step: StepOptions
    ema: float | None = None
    ema_warmup: bool = True
    decay_norms_and_biases: bool = True
    performance: PerformanceOptions = field(default_factory=PerformanceOptions)
