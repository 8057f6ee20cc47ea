"""Plans for tensor parallelism: data beside the model that says how the layers of a block are divided.

A plan is the attribute `tensor_parallel` of a block's class: a dict from the names of its modules to one of these words.

column   a linear layer of which each rank computes some units
heads    the same for units of attention heads, which stay together: `head_width` of the module around it for each head
row      a linear layer that gets the units that the rank computed; the outputs of all ranks are summed
tokens   a module that computes every token separately, such as a LayerNorm
gather   a module without parameters of its own whose layers get all tokens, for example an attention

A block gets and returns tokens, [b, tokens, width], in one tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.mesh_layout import OtherSizes

WORDS = ("column", "heads", "row", "tokens", "gather")


def plan_of(block: nn.Module) -> Mapping[str, str] | None:
    """Return the plan of a block; None if every rank computes it completely."""
    return getattr(block, "tensor_parallel", None)


def check_plans(model: Chain, shapes: Sequence[torch.Size], tp: int, sequence_parallel: bool, others: OtherSizes) -> None:
    """Check that the model's blocks can be divided as their plans require.

    Args:
        model: the complete model.
        shapes: shape of one sample's activation before each block, without the batch dimension; and after the last one.
        tp: number of ranks that share a block.
        sequence_parallel: whether they share the tokens, too.
        others: sizes of tp that the message may offer, as far as they divide everything.

    Raises:
        ConfigError: no block has a plan, a plan does not fit its block, or something is not divisible by `tp`.
    """
    blocks = list(model.named_children())
    if not any(plan_of(block) for _, block in blocks):
        raise ConfigError(
            f"strategy.tp={tp}: no block of the model has a plan for tensor parallelism. Give the class of its blocks "
            f"({', '.join(dict.fromkeys(type(block).__name__ for _, block in blocks))}) the attribute tensor_parallel, as in "
            "ddp_lab/models/vit.py: a dict from the names of their modules to column, heads, row, tokens or gather. Or use "
            f"strategy=tp, which needs no plan, or strategy.tp=1{' strategy.sequence_parallel=false' * sequence_parallel}"
        )
    if buffers := [name for name, _ in model.named_buffers()]:
        raise ConfigError(
            f"strategy.tp={tp}: does not support models with buffers, got {buffers[0]}. Use strategy=tp, or strategy.tp=1"
        )
    for name, block in blocks:
        if plan := plan_of(block):
            check_names(name, block, plan)
    if problem := indivisible(model, shapes, tp, sequence_parallel):
        raise ConfigError(f"{problem}. {remedy(model, shapes, tp, sequence_parallel, others)}")


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


def indivisible(model: Chain, shapes: Sequence[torch.Size], tp: int, sequence_parallel: bool) -> str | None:
    """Return why `tp` ranks cannot share the blocks; None if they can. The arguments are as in `check_plans`."""
    planned = [
        (name, block, shape) for (name, block), shape in zip(model.named_children(), shapes, strict=False) if plan_of(block)
    ]
    for name, block, _ in planned:
        for size, what, path in sizes_of(block):
            if size % tp:
                counted = f"{size} {what}s of {name}.{path} are" if size > 1 else f"1 {what} of {name}.{path} is"
                return f"strategy.tp={tp}: the {counted} not divisible by {tp}"
    if sequence_parallel and tp == 1:
        return "strategy.sequence_parallel=true: needs several ranks along tp to share the tokens, got strategy.tp=1"
    for name, _, shape in planned:
        if sequence_parallel and shape[0] % tp:
            with_class = any(path.endswith("class_token") for path, _ in model.named_parameters())
            hint = ", one of them the class token, which vit does not have with model.pool=mean," if with_class else ""
            return (
                f"strategy.sequence_parallel=true: the {shape[0]} tokens before {name}{hint} are not divisible by "
                f"strategy.tp={tp}"
            )
    return None


def sizes_of(block: nn.Module) -> Iterator[tuple[int, str, str]]:
    """Yield what `tp` must divide in a block with a plan: its number, what it is, and the layer."""
    modules: dict[str, Any] = dict(block.named_modules())
    for path, word in (plan_of(block) or {}).items():
        layer = modules[path]
        if word == "heads":
            yield layer.out_features // modules[path.rpartition(".")[0]].head_width, "head", path
        elif word == "column":
            yield layer.out_features, "unit", path
        elif word == "row":
            yield layer.in_features, "input", path


def remedy(model: Chain, shapes: Sequence[torch.Size], tp: int, sequence_parallel: bool, others: OtherSizes) -> str:
    """Return what to do if something is not divisible by `tp`. The arguments are as in `check_plans`."""
    fitting = [n for n in others.sizes if not indivisible(model, shapes, n, sequence_parallel)]
    if fitting:
        return f"With {others.ranks} use strategy.tp={' or '.join(map(str, fitting))}{others.also}"
    change = "strategy.sequence_parallel=false"
    if indivisible(model, shapes, tp, False):
        change = f"strategy.tp=1{others.also} with {change}"
    return f"With {others.ranks} there is no strategy.tp above 1 that divides heads, units and tokens; use {change}"
