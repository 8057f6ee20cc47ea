"""The example of a sample, with which a Lab tries model and loss before anything starts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.collated import collate
from ddp_lab.data.dataset import InMemory
from ddp_lab.data.loader import as_numbers
from ddp_lab.data.parts import TargetKey, as_tree, divide, has_target
from ddp_lab.data.trees import Tree, apply, leaves, stack


@dataclass(frozen=True)
class Parts:
    """How the samples of the datasets of a trainer become batches.

    Attributes:
        targets: place of the target in a sample, as in `parts.divide`.
        collate_fn: returns the batch of a list of samples; None: samples of equal shapes are
            stacked.
    """

    targets: TargetKey
    collate_fn: Callable[[list[Any]], Any] | None


@dataclass(frozen=True)
class Example:
    """Two copies of a sample, as a loader returns them: images are floats in [0, 1].

    Attributes:
        inputs: on the CPU.
        targets: of them; None if there are none, or if they are not known.
        is_complete: whether the sample has what the loss needs.
    """

    inputs: Tree
    targets: Tree
    is_complete: bool

    @property
    def form(self) -> Tree:
        """The inputs on the meta device."""
        return apply(lambda tensor: torch.empty_like(tensor, device="meta"), self.inputs)

    def get_inputs(self) -> Tree:
        """Return the inputs, as a strategy asks for them."""
        return self.inputs


def find_example(example: Any, parts: Parts) -> Example | None:
    """Return the example that a user has given.

    Args:
        example: a sample, or its inputs; None: there is none.
        parts: which part of it is the target.

    Raises:
        ConfigError: it does not consist of tensors.
    """
    if example is None:
        return None
    if parts.collate_fn is not None:
        inputs, targets = collate([example, example], parts.collate_fn, parts.targets, "example")
        return Example(*as_loaded(inputs, targets), is_complete=True)

    is_complete = has_target(example, parts.targets)
    sample, target = divide(example, parts.targets if is_complete else None, "example")
    if not is_complete and isinstance(sample, tuple) and len(sample) == 1:
        (sample,) = sample
    if other := describe_other(sample):
        kind = type(sample).__name__
        place, of_kind = other
        part = f", in which {place} is {of_kind}" if place else ""
        raise ConfigError(
            f"example: must be a sample of tensors, for example dataset[0], got {kind}{part}"
        )

    try:
        expected = as_tree(target, "targets")
    except (ConfigError, TypeError, ValueError, RuntimeError) as error:
        expected = None
        problem = f" ({error})"
    else:
        problem = ""

    if is_complete and parts.targets is not None and not any(True for _ in leaves(expected)):
        raise ConfigError(
            "example: the target of a sample must be a tensor or a number, got "
            f"{type(target).__name__}{problem}"
        )

    own_inputs = as_tree(sample, "inputs")
    return Example(
        *as_loaded(*stack([(own_inputs, expected), (own_inputs, expected)])),
        is_complete=is_complete,
    )


def describe_other(sample: Any, place: str = "") -> tuple[str, str] | None:
    """Return place and type of the first part of inputs that is no tensor and no array, or None.

    Args:
        sample: a tensor, an array, or a tuple or dict of them.
        place: of it in the inputs; "" of the inputs themselves.
    """
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        return None
    parts: dict[str, Any] = {}
    if isinstance(sample, (tuple, list)):
        elements = cast("list[Any]", sample)
        parts = {f"{place}[{number}]": part for number, part in enumerate(elements)}
    elif isinstance(sample, Mapping):
        items = cast("Mapping[Any, Any]", sample).items()
        parts = {f'{place}["{key}"]': part for key, part in items}
    if not parts:
        return place, type(sample).__name__
    others = (describe_other(part, where) for where, part in parts.items())
    return next((other for other in others if other), None)


def as_loaded(inputs: Tree, targets: Tree) -> tuple[Tree, Tree]:
    """Return a batch as a loader does: uint8 images as floats, other uint8 numbers as int64."""
    if InMemory(inputs, targets).is_image:
        return apply(lambda images: images.to(torch.get_default_dtype()) / 255, inputs), apply(
            as_numbers, targets
        )
    return apply(as_numbers, inputs), apply(as_numbers, targets)
