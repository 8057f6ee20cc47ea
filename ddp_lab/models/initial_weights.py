"""Initial weights by block name.

Each block is drawn from a generator of its own, so any rank can draw any block alone.

The generator of a block is seeded by the run's seed and the block's name. A rank that holds some of
the blocks, or shards of them, therefore has exactly the weights that one device would have, and no
rank ever needs the complete model.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain, block_of, tie, tied_parameters

KEY = "model.init=by_block"


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module by name.

    They include the buffers that are not persistent and so not saved.
    """
    return {
        name: tensor.detach()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }


class Weights(Protocol):
    """The initial weights of a model that is on the meta device."""

    def fill(
        self,
        blocks: nn.Module,
        device: torch.device,
        put: Callable[[Any, torch.Tensor], None],
    ) -> None:
        """Allocate blocks on a device, and give them their weights.

        Args:
            blocks: Its children are blocks of the model under their names.
            device: Where to allocate them.
            put: Copies a full tensor, maybe one in a file, into a tensor of a block, which may be
                sharded.
        """
        ...


class InitialWeights(Weights):
    """The initial weights of a chain, one block at a time: drawn by name, or from a file.

    Args:
        chain: the model on the meta device, a Chain. It may be changed afterwards.
        seed: the run's seed.

    Raises:
        ConfigError: the model is no Chain, or has parameters or buffers that cannot be drawn again.
    """

    def __init__(self, chain: nn.Module, seed: int):
        if not isinstance(chain, Chain):
            raise ConfigError(
                f"{KEY}: needs a model made of blocks, got a {type(chain).__name__}. Use "
                "model.init=default, or return an nn.Sequential or a Chain of blocks"
            )

        # without memory
        self.blocks = {name: copy.deepcopy(block) for name, block in chain.named_children()}
        self.initializers = chain.initializers
        self.seed = seed
        self.from_file: dict[str, torch.Tensor] = {}
        for name, block in self.blocks.items():
            list(resettable(block, name))

        self.ties = tied_parameters(chain)
        self._first_names = {name: first for first, *others in self.ties for name in others}

    def set_weights(self, state: dict[str, torch.Tensor]) -> None:
        """Use these tensors, by their names in the complete model, in place of drawn ones."""
        self.from_file = state

    @torch.no_grad()
    def fill(
        self,
        blocks: nn.Module,
        device: torch.device,
        put: Callable[[Any, torch.Tensor], None],
    ) -> None:
        """Allocate blocks, of which only one complete block at a time is in host memory."""
        here = dict(blocks.named_children())
        for block in here.values():
            block.to_empty(device=device)
        # each block has been allocated separately
        tie(blocks, ([name for name in names if block_of(name) in here] for names in self.ties))
        for name, block in here.items():
            full = self.of(name)
            for key, tensor in tensors_of(block).items():
                first = self._first_names.get(f"{name}.{key}")
                is_filled = first is not None and block_of(first) in here  # with that block
                if not is_filled:
                    put(full[key], tensor)

    def of(self, name: str) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of a block, on the CPU, by name within it.

        A parameter that is also one of another block before it has the weights of that block.

        Raises:
            ConfigError: `reset_parameters` of one of its modules does not set all of them.
        """
        names = tensors_of(self.blocks[name]).keys()
        from_file = {
            key: self.from_file[f"{name}.{key}"]
            for key in names
            if f"{name}.{key}" in self.from_file
        }
        if from_file.keys() == names:
            return from_file
        digest = hashlib.sha256(f"init seed={self.seed} block={name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):  # torch's random state is restored
            # it uses 32 bits
            torch.default_generator.manual_seed(int.from_bytes(digest[:4], "big"))
            drawn = self._draw(name) | from_file
        for key in names - from_file.keys():
            first = self._first_names.get(f"{name}.{key}", f"{name}.{key}")
            if block_of(first) != name:
                drawn[key] = self.of(block_of(first))[first.partition(".")[2]]
        return drawn

    def _draw(self, name: str) -> dict[str, torch.Tensor]:
        """Return newly drawn parameters and buffers of a block, from torch's CPU generator."""
        block = copy.deepcopy(self.blocks[name]).to_empty(device="cpu")
        for tensor in tensors_of(block).values():
            tensor.fill_(math.nan if is_real(tensor) else 0)
        for module in resettable(block, name):
            cast("Any", module).reset_parameters()
        for initialize in self.initializers:
            initialize(block)

        drawn = tensors_of(block)
        for key, tensor in drawn.items():
            if is_real(tensor) and tensor.isnan().any():
                raise ConfigError(
                    f"{KEY}: reset_parameters does not set {name}.{key} completely. It must "
                    "initialise all parameters and buffers of its module, also those of the "
                    "modules within; or use model.init=default"
                )
        return drawn


def is_real(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor may be NaN, which no initial weight is."""
    return tensor.is_floating_point() or tensor.is_complex()


def resettable(module: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yield the outermost modules with a method `reset_parameters` that initialises all in them.

    Raises:
        ConfigError: neither a module with parameters or buffers of its own nor one that contains it
            has the method.
    """
    if callable(getattr(module, "reset_parameters", None)):
        yield module
        return
    own_tensors = [
        name
        for name, _ in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]
    ]
    if own_tensors:
        raise ConfigError(
            f"{KEY}: {path} ({type(module).__name__}) has {', '.join(own_tensors)}, but no method "
            "reset_parameters, which would draw the initial weights again. Add the method, or use "
            "model.init=default"
        )
    for name, child in module.named_children():
        yield from resettable(child, f"{path}.{name}")
