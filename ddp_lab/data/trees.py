"""Nested batches: a tree is a tensor, or a tuple or dict of trees, whose tensors all have one row for each sample.

The only functions that walk over one. A tensor, which most batches are, costs no more than the call.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound="Tree")
Tree = torch.Tensor | tuple["Tree", ...] | dict[str, "Tree"]


def apply(function: Callable[[torch.Tensor], torch.Tensor], tree: T) -> T:
    """Return a tree of the same form with the results of a function of each tensor."""
    result: Any
    if isinstance(tree, torch.Tensor):
        result = function(tree)
    elif isinstance(tree, dict):
        result = {key: apply(function, part) for key, part in tree.items()}
    else:
        result = tuple(apply(function, part) for part in tree)
    return result


def size(tree: Tree) -> int:
    """Return the number of samples."""
    if isinstance(tree, torch.Tensor):
        return len(tree)
    parts = list(tree.values()) if isinstance(tree, dict) else tree
    return size(parts[0])


def rows(tree: T, index: slice | torch.Tensor) -> T:
    """Return some of the samples."""
    return apply(lambda tensor: tensor[index], tree)


def chunk(tree: T, number: int) -> list[T]:
    """Return the samples in `number` parts of about the same size, as torch.chunk divides them."""
    parts: list[Any]
    if isinstance(tree, torch.Tensor):
        parts = list(tree.chunk(number))
    elif isinstance(tree, dict):
        divided = {key: chunk(part, number) for key, part in tree.items()}
        parts = [dict(zip(divided, each, strict=True)) for each in zip(*divided.values(), strict=True)]
    else:
        parts = list(zip(*(chunk(part, number) for part in tree), strict=True))
    return parts


def pad(tree: T, number: int) -> T:
    """Return `number` samples: those of a tree, repeated, or zeros if it has none."""
    own = size(tree)
    if own == number:
        return tree
    if own == 0:
        return apply(lambda tensor: tensor.new_zeros(number, *tensor.shape[1:]), tree)
    return apply(lambda tensor: tensor[torch.arange(number, device=tensor.device) % own], tree)


def to(tree: T, device: torch.device) -> T:
    """Return the samples on a device."""
    return apply(lambda tensor: tensor.to(device, non_blocking=True), tree)
