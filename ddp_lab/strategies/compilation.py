"""What of a strategy torch.compile compiles: the complete model, pieces of it, or its blocks, and the loss.

torch.compile keeps what it has compiled with the code of a function, and uses it again where the types, shapes and attributes
are the same. The blocks of a Vision Transformer are equal, so all of them are compiled in the time of one. The complete model
would be one graph of all blocks.

Only a block's call is compiled. Hooks of fully_shard run outside of it, and state dicts keep their names.
"""

from collections import Counter
from collections.abc import Hashable
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from ddp_lab.models.chain import Chain
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.loss import measure

CompileFn: TypeAlias = "partial[Any]"  # torch.compile with its options


def why_not_compile(strategy: Strategy, model: nn.Module) -> str | None:
    """Return why the passes of a strategy cannot be compiled, or None if they can. Called after `Strategy.partition`."""
    if (strategy.compiled_by_block or strategy.bucket_sizes) and not isinstance(model, Chain):
        return f"strategy={strategy.name} compiles a model in blocks, and this one is not a Chain"
    return strategy.refusals.get("compile")


def compile_passes(strategy: Strategy, compile_fn: CompileFn) -> str:
    """Compile forward, loss and backward, in place. Called after `Strategy.setup`.

    Where gradients are sent during the backward pass, the model is compiled in pieces: the gradients of a piece are complete
    when its own backward pass ends, so a bucket can be sent while the next piece computes. Kernels are not fused across a cut,
    which costs some time (docs/log/benchmarks.md).

    Returns:
        What of the model is compiled, for the log.
    """
    strategy.measure = compile_fn(measure)
    model = strategy.module
    if strategy.compiled_by_block or repeats(model):
        blocks = [block for block in model.children() if any(True for _ in block.parameters())]
        for block in blocks:
            block.compile(**compile_fn.keywords)
        where = f" on rank {strategy.runtime.rank}" if strategy.axes.get("pp", 1) > 1 else ""
        return f"{count(len(blocks), 'block')} of {count(len(set(map(kind, blocks))), 'kind')}{where}"
    if strategy.bucket_sizes:
        assert isinstance(model, Chain)  # `why_not_compile`
        pieces = model.pieces(*strategy.bucket_sizes)
        model.execute_in(map(compile_fn, pieces))
        return f"the model in {count(len(pieces), 'piece')}"
    strategy.forward = compile_fn(model)
    return "the complete model"


def kind(block: nn.Module) -> Hashable:
    """Return a value that is the same for blocks of one class with the same modules and shapes."""
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    return modules, tuple(tensor.shape for tensor in block.state_dict().values())


def repeats(model: nn.Module) -> bool:
    """Return whether at least half of the model's blocks, and at least two, are of one kind.

    This is the case for a Vision Transformer, but not for ResNet-18, whose complete model compiles in seconds and is faster.
    """
    if not isinstance(model, Chain):
        return False
    most = max(Counter(map(kind, model.children())).values())
    return most >= 2 and 2 * most >= len(model)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, for example "1 block"."""
    return f"{number} {noun}{'s' * (number != 1)}"
