"""A model is a chain of named blocks, so that any strategy can cut it between two of them."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError


class Chain(nn.Sequential):
    """Blocks in the order in which they run, by name; `input_shape` is one sample's (channels, height, width)."""

    def __init__(self, input_shape: tuple[int, int, int], **blocks: nn.Module):
        super().__init__(OrderedDict(blocks))
        self.input_shape = input_shape
        self._executed: tuple[Callable[[torch.Tensor], torch.Tensor], ...] | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for piece in self if self._executed is None else self._executed:
            inputs = piece(inputs)
        return inputs

    def execute_in(self, pieces: Iterable[Callable[[torch.Tensor], torch.Tensor]]) -> None:
        """Have `forward` call `pieces`, one after the other, and no longer the blocks themselves.

        Args:
            pieces: `self.pieces(...)`, compiled: they compute what the blocks do, with the blocks' parameters. A tuple of them
                is kept, so that they are no submodules and the names of the parameters stay.
        """
        self._executed = tuple(pieces)

    def pieces(self, size: float, last: float = 0) -> list[nn.Sequential]:
        """Cut between blocks, from the last to the first, as soon as a piece holds parameters of at least `size` bytes. Where
        no more than `last` bytes are left they become the first piece, unless the one behind it is as small. In forward order.
        """
        weights = [sum(parameter.nbytes for parameter in block.parameters()) for block in self]
        pieces, held, left = [[]], 0, sum(weights)
        for block, weight in zip(reversed(self), reversed(weights), strict=True):
            if held >= size or held > last >= left > 0:
                pieces, held = [[], *pieces], 0
            pieces[0].insert(0, block)
            held, left = held + weight, left - weight
        return [nn.Sequential(*piece) for piece in pieces]


def init_normal(model: nn.Module, std: float) -> None:
    """Weights of convolutions and linear layers from N(0, std), their biases zero, as the textbooks have it."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def require_image_size(model: str, image_size: int, smallest: int) -> None:
    if image_size < smallest:
        raise ConfigError(f"model={model}: needs images of at least {smallest}x{smallest}, these are {image_size}x{image_size}")
