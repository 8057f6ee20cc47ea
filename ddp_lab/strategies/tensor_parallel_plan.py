"""Plans for tensor parallelism: data beside the model that says how the layers of a block are divided.

A plan is the attribute `tensor_parallel` of a block's class: a dict from the names of its modules to one of these words.

column   a linear layer of which each rank computes some units
heads    the same for units of attention heads, which stay together: `head_width` of the module around it for each head
row      a linear layer that gets the units that the rank computed; the outputs of all ranks are summed
tokens   a module that computes every token separately, such as a LayerNorm
gather   a module without parameters of its own whose layers get all tokens, for example an attention

A block gets and returns tokens, [b, tokens, width], in one tensor.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain

WORDS = ("column", "heads", "row", "tokens", "gather")


def plan_of(block: nn.Module) -> Mapping[str, str] | None:
    """Return the plan of a block; None if every rank computes it completely."""
    return getattr(block, "tensor_parallel", None)


def check_plans(model: Chain, shapes: Sequence[torch.Size], tp: int, sequence_parallel: bool) -> None:
    """Check that the model's blocks can be divided as their plans require.

    Args:
        model: the complete model.
        shapes: shape of one sample's activation before each block, without the batch dimension; and after the last one.
        tp: number of ranks that share a block.
        sequence_parallel: whether they share the tokens, too.

    Raises:
        ConfigError: no block has a plan, a plan does not fit its block, or something is not divisible by `tp`.
    """
    blocks = list(model.named_children())
    if not any(plan_of(block) for _, block in blocks):
        raise ConfigError(
            f"strategy.tp={tp}: no block of the model has a plan for tensor parallelism. Give the class of its blocks "
            f"({', '.join(dict.fromkeys(type(block).__name__ for _, block in blocks))}) the attribute tensor_parallel, as in "
            "ddp_lab/models/vit.py: a dict from the names of their modules to column, heads, row, tokens or gather. Or use "
            "strategy=tp, which needs no plan, or strategy.tp=1"
        )
    if buffers := [name for name, _ in model.named_buffers()]:
        raise ConfigError(
            f"strategy.tp={tp}: does not support models with buffers, got {buffers[0]}. Use strategy=tp, or strategy.tp=1"
        )
    for (name, block), shape in zip(blocks, shapes, strict=False):
        if plan := plan_of(block):
            check_names(name, block, plan)
            check_sizes(name, block, plan, tp)
            if sequence_parallel and shape[0] % tp:
                raise ConfigError(
                    f"strategy.sequence_parallel=true: the {shape[0]} tokens before {name} are not divisible by "
                    f"strategy.tp={tp}. Use {divisors(shape[0])}, or strategy.sequence_parallel=false. A class token makes an "
                    "even number of tokens odd: vit has none with model.pool=mean"
                )


def check_names(name: str, block: nn.Module, plan: Mapping[str, str]) -> None:
    """Check that a plan names all modules with parameters, and gives linear layers the words for linear layers.

    Raises:
        ConfigError: it does not.
    """
    key, modules = f"{type(block).__name__}.tensor_parallel", dict(block.named_modules())
    for path, word in plan.items():
        if path not in modules:
            raise ConfigError(f"{key}: {name} has no module {path}; it has {', '.join(filter(None, modules))}")
        if word not in WORDS:
            raise ConfigError(f"{key}: {path} must be one of {', '.join(WORDS)}, got {word}")
        if word in ("column", "heads", "row") and not isinstance(modules[path], nn.Linear):
            kind = type(modules[path]).__name__
            raise ConfigError(f"{key}: {path} is {word}, which must be a Linear, got {kind}; use tokens, or remove the plan")
    covered = tuple(f"{path}." for path, word in plan.items() if word != "gather")
    if missing := [path for path, _ in block.named_parameters() if not path.startswith(covered)]:
        raise ConfigError(f"{key}: must name the module of the parameter {missing[0]}, as one of {', '.join(WORDS[:-1])}")


def check_sizes(name: str, block: nn.Module, plan: Mapping[str, str], tp: int) -> None:
    """Check that heads, units and inputs of the layers of a block are divisible by `tp`.

    Raises:
        ConfigError: they are not.
    """
    modules: dict[str, Any] = dict(block.named_modules())
    for path, word in plan.items():
        layer = modules[path]
        if word == "heads":
            size, what = layer.out_features // modules[path.rpartition(".")[0]].head_width, "heads"
        elif word in ("column", "row"):
            size, what = (layer.out_features, "units") if word == "column" else (layer.in_features, "inputs")
        else:
            continue
        if size % tp:
            raise ConfigError(
                f"strategy.tp={tp}: the {size} {what} of {name}.{path} are not divisible by {tp}; use {divisors(size)}"
            )


def divisors(size: int) -> str:
    """Return the values of strategy.tp that divide `size`, for a message."""
    return "strategy.tp=" + " or ".join(str(n) for n in range(1, size + 1) if size % n == 0)
