"""Parameters of a model: where they are, how they get there, and what refers to them."""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import tied_parameters
from ddp_lab.strategies.dtensor import local, shard_like

if TYPE_CHECKING:
    from ddp_lab.models.initial_weights import Weights

Module = TypeVar("Module", bound=nn.Module)


def make_contiguous(model: nn.Module) -> None:
    """Lay the parameters of a model out in memory in the order of their dimensions.

    The first dimension is sharded.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()


def to_device(blocks: Module, device: torch.device, weights: "Weights | None") -> Module:
    """Move blocks of the model to a device, or draw their initial weights there; return them.

    Args:
        blocks: its children are blocks of the model under their names.
        device: the device.
        weights: of blocks that are on the meta device (`Strategy.initial_weights`); None if they
            have their weights.
    """
    if weights is None:
        return blocks.to(device)
    fill(blocks, weights, device)
    return blocks


def fill(blocks: nn.Module, weights: "Weights", device: torch.device) -> None:
    """Allocate blocks that are on the meta device, and give them their weights. Not collective.

    Args:
        blocks: Its children are blocks of the model under their names. Their parameters may be
            sharded (DTensors).
        weights: Of the model.
        device: Where to allocate them.
    """
    weights.fill(blocks, device, put)


def put(full: torch.Tensor, into: torch.Tensor) -> None:
    """Copy a full tensor into a tensor of its shape, or into this rank's shard of one."""
    local(into).copy_(local(shard_like(full, into)))


def require_one_place(
    model: nn.Module, strategy: str, place_of: Callable[[str], Hashable], why: str
) -> None:
    """Check that each parameter is in one place only: in several it would be several parameters.

    Args:
        strategy: for the message.
        place_of: returns the place of a parameter by name: its stage, device or unit.
        why: what is wrong with the same parameter elsewhere, for the message.

    Raises:
        ConfigError: a parameter has names in different places.
    """
    for first, *others in tied_parameters(model):
        for name in others:
            if place_of(name) != place_of(first):
                raise ConfigError(
                    f"strategy={strategy}: {name} is the same parameter as {first}, which {why}. "
                    "Use a copy, or another strategy, for example ddp"
                )


def has_hooks(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has hooks."""
    private: Any = parameter
    return bool(private._backward_hooks or private._post_accumulate_grad_hooks)
