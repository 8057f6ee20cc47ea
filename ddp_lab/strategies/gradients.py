"""Gradients of parameters: which parameters have one, and how their sums replace them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.strategies.dtensor import local

if TYPE_CHECKING:
    from ddp_lab.strategies.all_reduce import Algorithm


def trainable(parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Yield the parameters that are not frozen, which are those that get a gradient."""
    return (parameter for parameter in parameters if parameter.requires_grad)


def by_dtype(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by their type, in order.

    Flattening would convert the gradients of one group to one type.
    """
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return list(groups.values())


def multiply(gradients: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients by a number, in place.

    It is converted once for all of one device and type. torch would otherwise do so for each, and
    launch two kernels for each: 1.1 of 60 ms of a step of GPT-2 (an H200, 2026-11-28).

    Args:
        gradients: of parameters; of DTensors, this rank's shards are multiplied.
        factor: the number, [].
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for gradient in map(local, gradients):
        groups[gradient.device, gradient.dtype].append(gradient)
    for (device, dtype), alike in groups.items():
        converted = factor.to(device, dtype, non_blocking=True)
        torch._foreach_mul_(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            alike, converted
        )


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient of a parameter that took part in the step."""
    assert parameter.grad is not None, (
        f"a parameter of shape {list(parameter.shape)} got no gradient in this step"
    )
    return parameter.grad


def all_gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients of the parameters that are not frozen.

    Each of them has one (`unused.every_gradient`).
    """
    return [gradient_of(parameter) for parameter in trainable(parameters)]


def norm_over_stages(norm: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the L2 norm of the gradients of all stages of a pipeline, []. Collective.

    Args:
        norm: of the gradients of this rank's stages, [].
        group: the ranks of the pipeline.
    """
    squares = norm.square()
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def set_gradients(parameters: Iterable[nn.Parameter], gradients: list[torch.Tensor]) -> None:
    """Replace the gradient of each parameter by that at the same place of `gradients`."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def sum_gradients(parameters: Iterable[nn.Parameter], algorithm: "Algorithm") -> None:
    """Replace the gradients of parameters, each of which has one, by their sums over the ranks.

    Collective.
    """
    for same_type in by_dtype(trainable(parameters)):
        set_gradients(same_type, algorithm(all_gradients_of(same_type)))
