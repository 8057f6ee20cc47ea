"""A model as a chain of named blocks, which any strategy can cut between two blocks."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError


class Chain(nn.Sequential):
    """Named blocks in the order in which they run.

    Args:
        input_shape: shape of one sample, for example (channels, height, width).
        blocks: the modules by name; each gets the output of the one before it. A module without
            parameters and buffers may be in several places, each of which gets a copy, as torch
            lists the children of a module without repetitions.

    Attributes:
        input_dtype: of the input; None: torch's default, as of the parameters.
        initializers: draw a block's initial weights in place, one after the other, after
            `reset_parameters` of its modules. They are used where a block is drawn alone
            (models/initial_weights.py).

    Raises:
        ConfigError: two blocks are the same module, which has parameters or buffers.
    """

    def __init__(self, input_shape: tuple[int, ...], **blocks: nn.Module):
        super().__init__(OrderedDict(without_repetitions(blocks)))
        self.input_shape = input_shape
        self.input_dtype: torch.dtype | None = None
        self.initializers: list[Callable[[nn.Module], None]] = []
        self._executed: tuple[Callable[[torch.Tensor], torch.Tensor], ...] | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the output of the last block for images, [b, channels, height, width]."""
        for segment in self if self._executed is None else self._executed:
            input = segment(input)
        return input

    def initialize(self, initializer: Callable[[nn.Module], None]) -> None:
        """Let `initializer` draw the initial weights of all blocks, also of one drawn alone."""
        initializer(self)
        self.initializers.append(initializer)

    def execute_in(self, pieces: Iterable[Callable[[torch.Tensor], torch.Tensor]]) -> None:
        """Make `forward` call `pieces` sequentially instead of the blocks.

        Args:
            pieces: the compiled results of `self.pieces(...)`, which share the blocks' parameters.
                They are kept in a tuple, so that they do not become submodules, which would change
                the names of the parameters.
        """
        self._executed = tuple(pieces)

    def pieces(self, size: float, last: float = 0) -> list[nn.Sequential]:
        """Group the blocks so that each one's gradients are about as large as a bucket.

        Blocks are added to a group in the order of the backward pass, from the last to the first. A
        new group begins as soon as the current one has parameters of at least `size` bytes.

        Args:
            size: bytes of parameters per group.
            last: bytes; when the remaining blocks have at most this many, they become the last
                group of the backward pass, unless the current group has at most this many bytes,
                too.

        Returns:
            The groups in forward order, which share the blocks' parameters.
        """
        weights = [sum(parameter.nbytes for parameter in block.parameters()) for block in self]
        pieces: list[list[nn.Module]] = [[]]
        total = 0
        left = sum(weights)
        for block, weight in zip(reversed(self), reversed(weights), strict=True):
            if total >= size or total > last >= left > 0:
                pieces = [[], *pieces]
                total = 0
            pieces[0].insert(0, block)
            total = total + weight
            left = left - weight
        return [nn.Sequential(*piece) for piece in pieces]


def without_repetitions(blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the blocks with copies in place of repeated ones.

    The arguments and errors are those of `Chain`.
    """
    first: dict[nn.Module, str] = {}
    for name, block in blocks.items():
        if first.setdefault(block, name) != name and block.state_dict():
            raise ConfigError(
                f"the blocks {first[block]} and {name} of the model are the same "
                f"{type(block).__name__}: a strategy that cuts the model would train two of them. "
                "Use a copy, or put all places of it into one block"
            )
    return {
        name: block if first[block] == name else copy.deepcopy(block)
        for name, block in blocks.items()
    }


def block_of(name: str) -> str:
    """Return the block of a chain to which a parameter belongs, by the parameter's name."""
    return name.partition(".")[0]


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def tie(model: nn.Module, groups: Iterable[Sequence[str]]) -> None:
    """Let the names of each group have one parameter, that of the first name, in place."""
    for names in groups:
        for name in names[1:]:
            path, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(path), own_name, model.get_parameter(names[0]))


def untie(model: nn.Module, groups: Iterable[Sequence[str]]) -> None:
    """Remove the parameter of the other names of each group, in place, until `tie` is called."""
    for _, *others in groups:
        for name in others:
            path, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(path), own_name, None)


def has_hooks(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has hooks of the user, which autograd calls."""
    private: Any = parameter
    return bool(private._backward_hooks or private._post_accumulate_grad_hooks)


def init_normal(model: nn.Module, std: float, zero_biases: bool = True) -> None:
    """Draw the weights of convolutions and linear layers from N(0, std^2), biases 0 on request."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if zero_biases and module.bias is not None:
                nn.init.zeros_(module.bias)


def require_image_size(model: str, image_size: int, smallest: int) -> None:
    """Raise a ConfigError if the images have less than `smallest` pixels in height and width."""
    if image_size < smallest:
        raise ConfigError(
            f"model={model}: needs images of at least {smallest}x{smallest} pixels, got "
            f"{image_size}x{image_size}"
        )
