"""Parameters of a model: their layout in memory, their weights, and the names of the same one."""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import tied_parameters
from ddp_lab.strategies.dtensor import put

if TYPE_CHECKING:
    from ddp_lab.models.initial_weights import Weights


def make_contiguous(model: nn.Module) -> None:
    """Lay the parameters of a model out in memory in the order of their dimensions.

    The first dimension is sharded.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()


def fill(blocks: nn.Module, weights: "Weights", device: torch.device) -> None:
    """Allocate blocks that are on the meta device, and give them their weights. Not collective.

    Args:
        blocks: Its children are blocks of the model under their names. Their parameters may be
            sharded (DTensors).
        weights: Of the model.
        device: Where to allocate them.
    """
    weights.fill(blocks, device, put)


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
