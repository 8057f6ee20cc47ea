"""Compilation of a model block by block, in which equal blocks share one compilation.

torch.compile keeps what it has compiled with the code of a function, and uses it again where the types, shapes and attributes
are the same. The blocks of a Vision Transformer are equal, so all of them are compiled in the time of one. The complete model
would be one graph of all blocks.

Only a block's call is compiled. Hooks of fully_shard run outside of it, and state dicts keep their names.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from typing import Any, Protocol, TypeVar

from torch import nn

from ddp_lab.models.chain import Chain

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


class Fuse(Protocol):
    """torch.compile with its options: a functools.partial."""

    @property
    def keywords(self) -> dict[str, Any]:
        """The options, by name."""
        ...

    def __call__(self, model: Compiled, /) -> Compiled:
        """Return the compiled form of a module or a function."""
        ...


def kind(block: nn.Module) -> Hashable:
    """Return a value that is the same for blocks with the same modules, options and shapes."""
    modules = tuple((name, type(module), module.extra_repr()) for name, module in block.named_modules())
    tensors = chain(block.named_parameters(), block.named_buffers())
    return modules, tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)


def repeats(model: nn.Module) -> bool:
    """Return whether at least half of the model's blocks, and at least two, are of one kind.

    This is the case for a Vision Transformer, but not for ResNet-18, whose complete model compiles in seconds and is faster.
    """
    if not isinstance(model, Chain):
        return False
    most = max(Counter(map(kind, model.children())).values())
    return most >= 2 and 2 * most >= len(model)


def no_blocks(strategy: str, model: nn.Module) -> str | None:
    """Return why the blocks of a model cannot be compiled, or None if they can."""
    if isinstance(model, Chain):
        return None
    return f"strategy={strategy} compiles a model in blocks, and this one is not a Chain"


def compile_blocks(blocks: Iterable[nn.Module], fuse: Fuse) -> str:
    """Compile the calls of blocks, in place, and return how many there are, for the log."""
    compiled = [block for block in blocks if any(True for _ in block.parameters())]
    for block in compiled:
        block.compile(**fuse.keywords)
    kinds = len(set(map(kind, compiled)))
    return f"{count(len(compiled), 'block')} of {count(kinds, 'kind')}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, for example "1 block"."""
    return f"{number} {noun}{'s' * (number != 1)}"
