"""Whether a checkpoint was written with this launch's optimizer, also by another release of torch.

The names of the options do not identify an optimizer: a release of torch may add one or remove one.
"""

import inspect
from collections.abc import Mapping, Sequence, Set
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
    if old:
        parts.append(f"has the option {', '.join(old)}, which this launch does not have")
    return f"the optimizer in the checkpoint {' and '.join(parts)}" if parts else None


def counters_of(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Any, str],
    saved_groups: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the saved values that an optimizer keeps in each of its groups besides its options.

    Schedule-free optimizers, for example, count their steps there. What the constructor takes, and
    the learning rates, are options, which come from the launch and not from the checkpoint.

    Args:
        optimizer: of this launch.
        names: of its parameters.
        saved_groups: of a checkpoint, with the names of the parameters under "params".
    """
    options = {"params", "param_names", "initial_lr", *constructor_arguments(type(optimizer))}
    counters: list[dict[str, Any]] = []
    pairs = zip(
        optimizer.param_groups, groups_as_saved(optimizer, names, saved_groups), strict=True
    )
    for group, saved in pairs:
        kept = (group.keys() & saved.keys()) - options
        counters.append({key: saved[key] for key in kept if is_number(saved[key])})
    return counters


def groups_as_saved(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Any, str],
    saved_groups: Sequence[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    """Return what a checkpoint has of each parameter group; {} if it has none of its parameters.

    Arguments as of `counters_of`.
    """
    by_name = {name: group for group in saved_groups for name in group["params"]}
    saved_of_groups: list[Mapping[str, Any]] = []
    for place, group in enumerate(optimizer.param_groups):
        members = [by_name.get(names[parameter]) for parameter in group["params"]]
        saved = next(filter(None, members), None)
        if saved is None and len(saved_groups) == len(optimizer.param_groups):
            saved = saved_groups[place]  # of a stage without parameters of this group
        saved_of_groups.append(saved or {})
    return saved_of_groups


def rates_set_by_loop(saved_groups: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return the learning rate of each saved group if a loop had changed it; else None."""
    return [
        saved["lr"] if saved.get("lr") != saved.get("initial_lr") else None
        for saved in saved_groups
    ]


def constructor_arguments(kind: type) -> Set[str]:
    """Return the names of the arguments of a class and of those that it inherits from."""
    names: set[str] = set()
    for each in kind.__mro__:
        if "__init__" in vars(each):
            names |= inspect.signature(each.__init__).parameters.keys()
    return names


def is_number(value: Any) -> bool:
    """Return whether a value of a checkpoint is a number, True or False, and no description."""
    return isinstance(value, (bool, int, float))


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
