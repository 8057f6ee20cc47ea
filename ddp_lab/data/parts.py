"""The parts of a sample: which of them is the target, and how they become tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.trees import Tree

PAIR = 1  # the target of (input, target): the only sample in which this place is the target

TargetKey = str | int | None


def divide(item: Any, targets: TargetKey, subject: str, key: str = "targets") -> tuple[Any, Any]:
    """Return the inputs and the target of a sample, or of a batch that has the same form.

    Args:
        item: a tuple or list, or a dict; without a target also one tensor.
        targets: place of the target: a key of a dict or an index of a tuple; None: there is no
            target. The others are the inputs: as they are if a tuple has one other part, else a
            tuple or a dict.
        subject: begins the message.
        key: name of the argument that chooses the place, for the message.

    Raises:
        ConfigError: there is no such part, or no other one.
    """
    if targets is None:
        return tuple(item) if isinstance(item, list) else item, None
    if isinstance(targets, str):
        if not isinstance(item, Mapping) or targets not in item or len(item) < 2:
            raise ConfigError(
                f'{subject} must be a dict with the target "{targets}" and inputs, got '
                f"{describe_sample(item)}. Use the key or the place of the target as {key}; "
                f"{none_of(key)} if there is no target"
            )
        return {key: part for key, part in item.items() if key != targets}, item[targets]

    is_tuple = isinstance(item, (tuple, list))
    count = len(item) if is_tuple else 0
    if targets == PAIR and count != 2:
        raise ConfigError(
            f"{subject} must be (input, target), got {describe_sample(item)}. "
            f"{advice_on_target(item, key)}"
        )

    if count < 2 or not -count <= targets < count:
        raise ConfigError(
            f"{subject} must be a tuple with the target at {key}={targets} and inputs, got "
            f"{describe_sample(item)}. {advice_on_target(item, key)}"
        )

    parts = [*item]
    target = parts.pop(targets)
    return parts[0] if len(parts) == 1 else tuple(parts), target


def has_target(item: Any, targets: TargetKey) -> bool:
    """Return whether an example is a complete sample, and not its inputs alone.

    The arguments are as in `divide`.
    """
    if targets is None:
        return True
    if isinstance(targets, str):
        return isinstance(item, Mapping) and targets in item and len(item) > 1
    count = len(item) if isinstance(item, (tuple, list)) else 0
    return count == 2 if targets == PAIR else count > 1 and -count <= targets < count


def describe_sample(item: Any) -> str:
    """Return the type of a sample, with its keys or its length."""
    kind = type(item).__name__
    if isinstance(item, Mapping):
        return f"{kind} with {', '.join(map(str, item))}" if item else f"{kind} without keys"
    return f"{kind} of {len(item)}" if isinstance(item, (tuple, list)) else kind


def advice_on_target(item: Any, key: str) -> str:
    """Return how to name the target of a sample that is no pair, by the argument `key`."""
    if isinstance(item, Mapping):
        keys = [*map(str, item)]
        return f'Name the key of its target, for example {key}="{keys[-1] if keys else "label"}"'
    if isinstance(item, (tuple, list)) and len(item) > 2:
        return (
            f"Name the place of its target, for example {key}={len(item) - 1}, or {key}=-2 for "
            "the last but one"
        )
    return (
        f"Return an input and its target; or use {key}={none_of(key)} for a loss of the outputs "
        "alone"
    )


def none_of(key: str) -> str:
    """Return how None is written as the value of an argument, or of a key of the config."""
    return "null" if "." in key else "None"


def as_tree(value: Any, place: str) -> Tree:
    """Return a part of a sample as tensors.

    Args:
        value: a tensor, an array, numbers, or a tuple, list or dict of them.
        place: name of the part, for messages.

    Raises:
        ConfigError: it contains text.
        TypeError, ValueError, RuntimeError: torch does not make a tensor of a value.
    """
    if isinstance(value, torch.Tensor) or value is None:
        return value
    if isinstance(value, (str, bytes)):
        raise ConfigError(
            f"{place} is {type(value).__name__}. Text must become numbers, for example those of "
            "tokens or of a class, in the dataset or in collate_fn"
        )
    if isinstance(value, Mapping):
        return {str(key): as_tree(part, f'{place}["{key}"]') for key, part in value.items()}
    if isinstance(value, (tuple, list)) and any(map(is_part, value)):
        return tuple(as_tree(part, f"{place}[{number}]") for number, part in enumerate(value))
    return torch.as_tensor(value)


def is_part(value: Any) -> bool:
    """Return whether an element of a list is a part of its own and the list is not one tensor."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.ndim > 0
    if isinstance(value, (tuple, list)):
        return any(map(is_part, value))
    return isinstance(value, (Mapping, str, bytes))
