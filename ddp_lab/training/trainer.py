"""How a model is trained, and what trains it: optimizer and step, on the devices of a strategy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ddp_lab.config.build import has_modes
from ddp_lab.config.errors import ConfigError, describe_error, raise_first
from ddp_lab.strategies.base import Strategy
from ddp_lab.tasks.base import Task
from ddp_lab.training.optimizer import (
    ELEMENTWISE,
    MakeOptimizer,
    configure_optimizer,
    construct_optimizer,
    has_shards,
    param_groups,
    require_own_parameters,
    require_plain_step,
)
from ddp_lab.training.performance import PerformanceOptions
from ddp_lab.training.step import Step, StepOptions

if TYPE_CHECKING:
    from ddp_lab.training.ema import EMA
    from ddp_lab.training.groups import ParameterGroups
    from ddp_lab.training.two_modes import EvaluationWeights

GROUPS = "groups, dicts with the key params, because decay_norms_and_biases=false"


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
        groups: of the parameters, by their names; None: all of them have the same options.
    """

    batch_size: int
    optimizer: Callable[..., torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], LambdaLR]
    step: StepOptions
    ema: float | None = None
    ema_warmup: bool = True
    decay_norms_and_biases: bool = True
    performance: PerformanceOptions = field(default_factory=PerformanceOptions)
    groups: "ParameterGroups | None" = None


class Trainer:
    """A model that a strategy has placed on its devices, and what updates it. Collective.

    Args:
        strategy: after `partition`.
        model: the complete model, as for `Strategy.setup`.
        task: what it is trained for, with the loss.
        recipe: how.

    Attributes:
        strategy: after `setup`.
        optimizer, scheduler, ema: of its parameters. `ema` has the weights of evaluations, which
            are averages, or those of an optimizer with modes; None: they are those that train.
        eager_step: the training step in eager mode.
        seed: of the run.

    Raises:
        ConfigError: the recipe's optimizer cannot be made.
    """

    def __init__(self, strategy: Strategy, model: nn.Module, task: Task, recipe: Recipe):
        strategy.place(model, task, recipe.performance.channels_last)
        self.strategy = strategy
        self.seed = recipe.step.seed
        self.optimizer = make_optimizer(recipe, strategy, model)
        self.scheduler = recipe.scheduler(self.optimizer)
        self.ema = evaluated_weights(recipe, strategy, self.optimizer)
        self.eager_step = Step(strategy, self.optimizer, self.scheduler, recipe.step, self.ema)


def evaluated_weights(
    recipe: Recipe, strategy: Strategy, optimizer: torch.optim.Optimizer
) -> "EMA | EvaluationWeights | None":
    """Return the weights of evaluations: averages, or those of an optimizer with modes, or None.

    Args:
        recipe: how the weights are averaged.
        strategy: after `setup`.
        optimizer: of the parameters that this rank holds.

    Raises:
        ConfigError: the optimizer has modes, and the weights are to be averaged, too.
    """
    if has_modes(optimizer):
        from ddp_lab.training import two_modes

        require_no_averages(recipe.ema, optimizer)
        return two_modes.EvaluationWeights(strategy, optimizer)
    if recipe.ema is None:
        return None
    from ddp_lab.training import ema

    return ema.EMA(strategy, recipe.ema, recipe.ema_warmup)


def make_optimizer(recipe: Recipe, strategy: Strategy, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that this rank holds. Collective.

    Args:
        recipe: with the function that makes it.
        strategy: after `setup`.
        model: the complete model.

    Raises:
        ConfigError: the recipe's fails, or is not a function of parameters, or cannot update what
            the strategy holds.
    """
    make = recipe.optimizer
    if isinstance(make, torch.optim.Optimizer) or not callable(make):
        raise ConfigError(
            "optimizer: must be a function of parameters, because the strategy may replace those "
            "of the model, for example partial(torch.optim.AdamW, lr=1e-3), got "
            f"{type(make).__name__}"
        )
    groups = recipe.groups or groups_of_class(make, model)
    each_group: Sequence[MakeOptimizer] = groups.each(make) if groups else [make]
    if groups:
        make = groups.bind(make, (model, strategy.module))
    decays_all = recipe.decay_norms_and_biases
    trained = [parameter for parameter in strategy.module.parameters() if parameter.requires_grad]
    has_part = strategy.axes.get("pp", 1) > 1 or bool(strategy.idle)
    optimizer = None
    problem = ""
    try:
        if has_part:
            from ddp_lab.training.part_optimizer import construct_for_part

            optimizer = construct_for_part(make, decays_all, trained, model, strategy.idle)
        else:
            optimizer = construct_optimizer(make, param_groups(trained, decays_all))
        require_own_parameters(optimizer, (model, strategy.module))
    except ConfigError as error:
        problem = str(error)
    except (TypeError, ValueError, AttributeError) as error:
        hint = "" if decays_all else f". It gets two {GROUPS}"
        problem = f"optimizer: {describe_error(error)}{hint}"
    if has_part:  # other ranks have other parameters
        strategy.runtime.gather_and_decide("optimizer", problem, raise_first)
    else:
        raise_first([problem])
    assert optimizer is not None
    if not type(optimizer).__module__.startswith("torch.optim."):
        require_plain_step(recipe.optimizer, model.parameters())
    is_divided = has_shards(optimizer) or strategy.axes.get("pp", 1) > 1
    if is_divided and type(optimizer) not in ELEMENTWISE:
        from ddp_lab.training.divided_optimizer import check_divided

        for of_group in each_group:
            check_divided(of_group, optimizer, strategy, decays_all)
    how = recipe.performance
    return configure_optimizer(
        optimizer,
        strategy.device,
        how.fused,
        how.cuda_graph,
        how.compile is True,
        skips=strategy.loss_scale is not None,
    )


def groups_of_class(make: MakeOptimizer, model: nn.Module) -> "ParameterGroups | None":
    """Return the groups that the class of an optimizer makes of a model's parameters, or None.

    Args:
        make: the user's function of parameters.
        model: the complete model.
    """
    kind: Any = make
    while isinstance(kind, partial):
        kind = kind.func
    if not hasattr(kind, "default_groups"):
        return None
    from ddp_lab.training.default_group import DefaultGroup
    from ddp_lab.training.groups import make_groups

    return make_groups(model, [], None, 1.0, DefaultGroup.of(kind, model))


def require_no_averages(decay: float | None, optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer which has weights for evaluations is the only one that has them.

    Raises:
        ConfigError: averages of the weights are wanted, too.
    """
    if decay is not None:
        raise ConfigError(
            f"ema={decay}: is not supported with the optimizer {type(optimizer).__name__}, which "
            "has other weights for evaluations by itself (methods train() and eval()). Use "
            "ema=null, the default"
        )
