"""How a model is trained, and the model and its optimizer on the devices."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.lab.log import LabLogger
from ddp_lab.speed.convolution import to_channels_last
from ddp_lab.speed.fastest import PerformanceOptions
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.parameter_hooks import take_hooks
from ddp_lab.tasks.base import Task
from ddp_lab.training.optimizer import configure_optimizer, param_groups
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


@dataclass(frozen=True)
class TrainerOptions:
    """What only a loop in a Lab needs of a trainer.

    Attributes:
        logger: of the Lab.
        num_workers: processes of each rank that read a dataset which is not a torch TensorDataset; 0: the rank itself.
    """

    logger: LabLogger = field(default_factory=lambda: LabLogger(None, "none", {}, {}))
    num_workers: int = 0


def place(strategy: Strategy, model: nn.Module, task: Task, performance: PerformanceOptions) -> None:
    """Connect the ranks, and place the model and the task on their devices. Collective.

    Args:
        strategy: after `partition`.
        model: as for `Strategy.setup`.
        task: with the loss.
        performance: how a step is executed.
    """
    if not strategy.one_process:
        strategy.runtime.open_group()
    strategy.task = task.to(strategy.device)
    strategy.parameter_hooks = take_hooks(model)
    strategy.setup(to_channels_last(model) if performance.channels_last else model)
    strategy.initial_weights = None  # the tensors of a file are not needed any more


def make_optimizer(recipe: Recipe, strategy: Strategy) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that this rank holds.

    Raises:
        ConfigError: the recipe's fails, or is not a function of parameters, or cannot update what the strategy holds.
    """
    make = recipe.optimizer
    if isinstance(make, torch.optim.Optimizer) or not callable(make):
        raise ConfigError(
            "optimizer: must be a function of parameters, because the strategy may replace those of the model, for example "
            f"partial(torch.optim.AdamW, lr=1e-3), got {type(make).__name__}"
        )
    try:
        optimizer = make(param_groups(strategy.module.parameters(), recipe.decay_norms_and_biases))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer: {describe_error(error)}") from None
    how = recipe.performance
    return configure_optimizer(optimizer, strategy.device, how.fused, how.cuda_graph, how.compile is True)
