"""What a checkpoint holds, and whether a checkpoint fits the model and the optimizer of a launch."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.ema import EMA

Shapes = Mapping[str, tuple[int, ...]]
Write = Callable[[Path, Callable[[], None]], None]  # writes a copy to a path, after a call of the second argument
KEYS = {"progress", "seed", "scheduler", "optimizer"}  # in every checkpoint, besides tensors


@dataclass
class State:
    """What is saved and loaded.

    Attributes:
        strategy: after `Strategy.setup`.
        optimizer, scheduler: of its parameters.
        shapes: the shape of each tensor of the full model by name.
        ema: averages of the weights; None: no averages.
        seed: the seed of this launch.
    """

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    shapes: Shapes
    ema: EMA | None = None
    seed: int = 0


@contextmanager
def reading(about: str) -> Generator[None]:
    """Turn any error of reading a checkpoint into a ConfigError. `about` is the beginning of its message: key and path."""
    try:
        yield
    except Exception as error:  # the bytes of a file that somebody else wrote may mean anything to a parser
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise ConfigError(
            f"{about}: is not a checkpoint of ddp_lab ({reason}). Use a file step_* or best.* of a run's checkpoints"
        ) from None


def require_keys(state: dict[str, Any], keys: set[str]) -> None:
    """Raise a ValueError if a checkpoint lacks one of its keys."""
    if missing := keys - state.keys():
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")


def check_shapes(about: str, saved: Shapes, shapes: Shapes) -> None:
    """Check that the tensors in a checkpoint are those of a model.

    Args:
        about: the beginning of the message: the key and the path.
        saved, shapes: the shape of each tensor in the checkpoint and in the full model, by name.

    Raises:
        ConfigError: a tensor differs; the message names the first one.
    """
    for name in [*shapes, *saved]:
        here, there = shapes.get(name, "missing"), saved.get(name, "missing")
        if here != there:
            other = ", another name, or resume=never" * about.startswith("resume=")
            raise ConfigError(
                f"{about}: does not match the model: {name} is {there} in the checkpoint, {here} in the model. "
                f"Use the model and data that it was trained with{other}"
            )


def check_optimizer(path: str, saved: list[dict[str, Any]], state: State) -> None:
    """Check that the optimizer in a checkpoint has the options of this launch's, and the same parameters.

    Args:
        path: the checkpoint.
        saved: the parameter groups in the checkpoint.
        state: of this launch.

    Raises:
        ConfigError: it is another optimizer, or a parameter is frozen in one of the two only.
    """
    options, expected = saved[0].keys() - {"params"}, state.optimizer.param_groups[0].keys() - {"params"}
    if options != expected:
        raise ConfigError(
            f"resume={path}: was written with another optimizer: its options are {', '.join(sorted(options))}; expected "
            f"{', '.join(sorted(expected))}. Use the optimizer that it was trained with, or another name"
        )
    trained = {name for group in saved for name in group["params"]}
    for name, parameter in state.strategy.module.named_parameters():
        if parameter.requires_grad != (name in trained):
            now, then = ("trained", "frozen") if parameter.requires_grad else ("frozen", "trained")
            raise ConfigError(
                f"resume={path}: the parameter {name} is {now} in this launch and was {then} when the checkpoint was "
                f"written. Freeze the same parameters, or begin a new run from these weights: model.weights={path} with "
                "another name"
            )
