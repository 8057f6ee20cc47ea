"""Whether the optimizer of a launch can resume from the one in a checkpoint."""

from typing import Any

import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.strategies.base import Strategy


def check_optimizer(path: str, saved: list[dict[str, Any]], strategy: Strategy, optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer in a checkpoint has the options of this launch's, and the same parameters.

    Args:
        path: the checkpoint.
        saved: the parameter groups in the checkpoint.
        strategy, optimizer: those of this launch.

    Raises:
        ConfigError: it is another optimizer, or other parameters are frozen.
    """
    options, expected = saved[0].keys() - {"params"}, optimizer.param_groups[0].keys() - {"params"}
    if options != expected:
        raise ConfigError(
            f"resume={path}: was written with another optimizer: its options are {', '.join(sorted(options))}; expected "
            f"{', '.join(sorted(expected))}. Use the optimizer that it was trained with, or another name"
        )
    check_frozen(path, {name for group in saved for name in group["params"]}, strategy)


def check_frozen(path: str, trained: set[str], strategy: Strategy) -> None:
    """Check that the parameters in the checkpoint's optimizer, `trained`, are those that this launch trains.

    Raises:
        ConfigError: a parameter is frozen in one of the two only, so its optimizer state is missing or superfluous.
    """
    for name, parameter in strategy.module.named_parameters():
        if parameter.requires_grad != (name in trained):
            now, then = ("trained", "frozen") if parameter.requires_grad else ("frozen", "trained")
            raise ConfigError(
                f"resume={path}: the parameter {name} is {now} in this launch and was {then} when the checkpoint was "
                f"written. Freeze the same parameters, or begin a new run from these weights: model.weights={path} with "
                "another name"
            )
