"""Whether a checkpoint was written with this launch's optimizer, also by another release of torch.

The names of the options do not identify an optimizer: a release of torch may add one or remove one.
"""

import inspect
from collections.abc import Set
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ddp_lab.config.build import for_cpu


class SavedOptimizer(NamedTuple):
    """What a checkpoint records of its optimizer.

    Attributes:
        kind: name of its class; None in checkpoints of versions up to 2026-11.
        options: names of the options of a parameter group.
        states: names of what it keeps for a parameter, such as momentum_buffer.
    """

    kind: str | None
    options: Set[str]
    states: Set[str]


def options_of(optimizer: torch.optim.Optimizer) -> Set[str]:
    """Return the names of the options of the first parameter group."""
    return optimizer.param_groups[0].keys() - {"params"}


def is_same(saved: SavedOptimizer, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a checkpoint was written with this optimizer.

    With equal options it is the same one: SGD keeps a state with momentum only, which may be added
    on a resume.
    """
    options = options_of(optimizer)
    if saved.options == options:
        return True
    if saved.kind is not None:
        return saved.kind == type(optimizer).__name__
    contained = saved.options < options or options < saved.options
    return contained and saved.states == states_of(optimizer)


def describe_options(saved: SavedOptimizer, optimizer: torch.optim.Optimizer) -> str | None:
    """Return a line about options that only the checkpoint or only this launch has, or None."""
    options = options_of(optimizer)
    new = sorted(options - saved.options)
    old = sorted(saved.options - options)
    parts = []
    if new:
        parts = [f"has no option {', '.join(new)}, of which the values of this launch are used"]
    parts += [f"has the option {', '.join(old)}, which this launch does not have"] if old else []
    return f"the optimizer in the checkpoint {' and '.join(parts)}" if parts else None


def states_of(optimizer: torch.optim.Optimizer) -> Set[str] | None:
    """Return the names of what an optimizer keeps for a parameter.

    Take a step of an optimizer like it. Return None if that fails.
    """
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters.keys() - {"params"}
    arguments = {
        name: value for name, value in optimizer.param_groups[0].items() if name in accepted
    }
    plain: dict[str, Any] = {
        name: value.item() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }

    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.zeros_like(weight)
    with suppress(Exception):  # a class of the user's may need other arguments
        like = for_cpu(cast("Any", kind)([weight], **plain))
        like.step()
        return set(like.state[weight])
    return None
