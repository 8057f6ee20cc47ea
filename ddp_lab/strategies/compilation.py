"""Compilation of a strategy's passes: of the model as a whole, in pieces, or block by block.

A model with equal blocks is compiled block by block, and equal blocks share one compilation.

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
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.loss import measure

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


def why_not_compile(strategy: Strategy, model: nn.Module) -> str | None:
    """Return why the model cannot be compiled under a strategy, or None if it can."""
    if (strategy.compiled_by_block or strategy.bucket_sizes) and not isinstance(model, Chain):
        return f"strategy={strategy.name} compiles a model in blocks, and this one is not a Chain"
    return strategy.refusals.get("compile")


def compile_passes(strategy: Strategy, fuse: Fuse) -> str:
    """Compile forward, loss and backward of a strategy. Called after `setup`, if "compile" is one of its options.

    Where gradients are sent in buckets, the model is compiled in several pieces, so that the gradients of a piece are complete
    when its own backward pass ends. A bucket can then be sent while the next piece computes. Kernels are not fused across a
    cut, which costs some time (docs/log/benchmarks.md).

    Args:
        fuse: torch.compile with its options.

    Returns:
        What of the model was compiled, for the log.
    """
    model = strategy.module
    strategy.measure = fuse(measure)
    if strategy.compiled_by_block or repeats(model):
        on_rank = f" on rank {strategy.runtime.rank}" if strategy.axes.get("pp", 1) > 1 else ""
        return compile_blocks(model.children(), fuse) + on_rank
    if strategy.bucket_sizes:
        assert isinstance(model, Chain)  # `why_not_compile`
        pieces = model.pieces(*strategy.bucket_sizes)
        model.execute_in(map(fuse, pieces))
        return f"the model in {count(len(pieces), 'piece')}"
    strategy.forward = fuse(model)
    return "the complete model"


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
