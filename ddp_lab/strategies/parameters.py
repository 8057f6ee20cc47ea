"""Parameters of a model: their layout in memory, and their weights."""

from typing import TYPE_CHECKING

import torch
from torch import nn

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
