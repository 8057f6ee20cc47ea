"""Nested batches: a tree is a tensor, or a tuple or dict of trees.

All of its tensors have one row for each sample.

The only functions that walk over one. A tensor, which most batches are, costs no more than the
call. None is a tree without tensors: the targets of a loss that depends on the outputs alone.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from ddp_lab.config.errors import ConfigError

T = TypeVar("T", bound="Tree")
Tree = torch.Tensor | tuple["Tree", ...] | dict[str, "Tree"] | None


def apply(function: Callable[[torch.Tensor], torch.Tensor], tree: T) -> T:
    """Return a tree of the same form with the results of a function of each tensor."""
    result: Any
    if isinstance(tree, torch.Tensor):
        result = function(tree)
    elif isinstance(tree, dict):
        result = {key: apply(function, part) for key, part in tree.items()}
    elif tree is None:
        result = None
    else:
        result = tuple(apply(function, part) for part in tree)
    return result


def leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor with its name.

    Args:
        tree: of any form.
        name: of the tree. That of a tensor in it is, for example, inputs["mask"] or inputs[0].
    """
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif tree is not None:
        parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, part in parts:
            place = f'"{key}"' if isinstance(key, str) else key
            yield from leaves(part, f"{name}[{place}]")


def size(tree: Tree) -> int:
    """Return the number of samples; 0 if there is no tensor."""
    if isinstance(tree, torch.Tensor):
        return len(tree)
    return next((len(tensor) for _, tensor in leaves(tree)), 0)


def rows(tree: T, index: slice | torch.Tensor) -> T:
    """Return some of the samples."""
    return apply(lambda tensor: tensor[index], tree)


def chunk(tree: T, number: int) -> list[T]:
    """Return the samples in `number` parts of about the same size, as torch.chunk divides them."""
    parts: list[Any]
    if isinstance(tree, torch.Tensor):
        parts = list(tree.chunk(number))
    else:
        samples = size(tree)
        step = -(-samples // number)
        parts = [rows(tree, slice(first, first + step)) for first in range(0, samples, step)]
    return parts


def stack(
    samples: Sequence[T], stack_tensors: Callable[[list[torch.Tensor]], torch.Tensor] = torch.stack
) -> T:
    """Return the batch of some samples.

    Args:
        samples: trees of the same form, without the batch dimension.
        stack_tensors: returns the tensors of all samples at one place as one, [b, ...].
    """
    first: Any = samples[0]
    several: Sequence[Any] = samples
    result: Any
    if isinstance(first, torch.Tensor):
        result = stack_tensors([*several])
    elif isinstance(first, dict):
        result = {key: stack([sample[key] for sample in several], stack_tensors) for key in first}
    elif first is None:
        result = None
    else:
        result = tuple(stack([*parts], stack_tensors) for parts in zip(*several, strict=True))
    return result


def pad(tree: T, number: int) -> T:
    """Return `number` samples: those of a tree, repeated, or zeros if it has none."""
    num_rows = size(tree)
    if num_rows == number:
        return tree
    if num_rows == 0:
        return apply(lambda tensor: tensor.new_zeros(number, *tensor.shape[1:]), tree)
    return apply(lambda tensor: tensor[torch.arange(number, device=tensor.device) % num_rows], tree)


def to(tree: T, device: torch.device | str) -> T:
    """Return the samples on a device."""
    return apply(lambda tensor: tensor.to(device, non_blocking=True), tree)


def number_of_bytes(tree: Tree) -> int:
    """Return the memory of all tensors."""
    return sum(tensor.nbytes for _, tensor in leaves(tree))


def form_of(tree: Tree) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Return what two batches of the same form have in common.

    These are the names of the tensors, the shapes of samples, and the dtypes.
    """
    return [(name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in leaves(tree)]


def require_one_size(subject: str, **trees: Tree) -> int:
    """Return the number of samples, which all tensors must have.

    Args:
        subject: whose batch it is; begins the message.
        trees: by name, of which at least one has a tensor.

    Raises:
        ConfigError: two tensors have different first dimensions, or one has none.
    """
    sizes: dict[str, int] = {}
    for name, tree in trees.items():
        for place, tensor in leaves(tree, name):
            if not tensor.dim():
                raise ConfigError(
                    f"{subject}: {place} has no dimension, but must be [b, ...], with a row for "
                    "each sample"
                )
            sizes[place] = len(tensor)

    if len(set(sizes.values())) > 1:
        sizes_text = ", ".join(f"{place} has {number}" for place, number in sizes.items())
        raise ConfigError(
            f"{subject}: all parts of a batch must have the same number of samples, but "
            f"{sizes_text}. Let each be [b, ...], with a row for each sample"
        )
    return next(iter(sizes.values()), 0)


def require_tensors(subject: str, tree: Any) -> None:
    """Check that a batch consists of tensors.

    Args:
        subject: what the batch is; begins the message.
        tree: what a user has passed.

    Raises:
        ConfigError: it contains something else, such as text or an array.
    """
    if isinstance(tree, torch.Tensor) or tree is None:
        return
    if not isinstance(tree, (tuple, dict)):
        hint = advice_on(tree)
        raise ConfigError(
            f"{subject}: must be a tensor, or a tuple or dict of tensors, got "
            f"{type(tree).__name__}. {hint}"
        )
    parts: Any = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, part in parts:
        place = f'"{key}"' if isinstance(key, str) else key
        require_tensors(f"{subject}[{place}]", part)


def require_no_arrays(subject: str, *arguments: Any, **keywords: Any) -> None:
    """Check that no argument of a model is a NumPy array.

    Others, such as None, a flag or an object, are passed as they are.

    Args:
        subject: which method got the arguments; begins the message.
        arguments, keywords: of the model.

    Raises:
        ConfigError: one is an array.
    """
    for place, value in [*enumerate(arguments), *keywords.items()]:
        if type(value).__module__ == "numpy":
            raise ConfigError(
                f"{subject}: the argument {place} is {type(value).__name__}, but must be a tensor. "
                "Use torch.as_tensor"
            )


def advice_on(value: object) -> str:
    """Return what to do about a value that is no tensor."""
    if isinstance(value, (str, bytes)) or (
        isinstance(value, list) and value and isinstance(value[0], (str, bytes))
    ):
        return (
            "Text must become numbers, for example those of tokens or of a class, in the dataset "
            "or in collate_fn"
        )
    return "Use torch.as_tensor"
