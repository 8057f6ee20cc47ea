"""Plans of blocks: how tensor parallelism divides each of them, and whether a number of ranks can.

How a block is divided is data beside the model: its plan, the attribute `tensor_parallel` of its
class. A block without a plan is computed by every rank. A plan is a dict from the names of the
block's modules to one of these words:

column   a linear layer of which each rank computes some units
heads    the same for units of attention heads, which stay together: each head has as many units as
         `head_width` of the module around it says
row      a linear layer that gets the units that the rank computed; the outputs of all ranks are
         summed
tokens   a module that computes every token separately, such as a LayerNorm
gather   a module without parameters of its own whose layers get all tokens, for example an
         attention

A block gets and returns tokens, [b, tokens, width], in one tensor. divided_blocks.py divides it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain, tied_parameters

WORDS = ("column", "heads", "row", "tokens", "gather")


def plan_of(block: nn.Module) -> Mapping[str, str] | None:
    """Return the plan of a block; None if every rank computes it completely."""
    return getattr(block, "tensor_parallel", None)


def is_of_user(block: nn.Module) -> bool:
    """Return whether a block has a plan that is not one of ddp_lab's own, which are tested."""
    is_own = type(block).__module__.partition(".")[0] == "ddp_lab"
    return plan_of(block) is not None and not is_own


def plans_for(model: nn.Module, tp: int) -> tuple[dict[str, nn.Module], str]:
    """Return the blocks with a plan by name, and why they are not divided by it: "" if they are.

    Args:
        model: the complete model.
        tp: number of ranks that share a block.

    Raises:
        ConfigError: a plan does not fit its block.
    """
    blocks = {name: block for name, block in model.named_children() if plan_of(block) is not None}
    if not isinstance(model, Chain) or not blocks:
        return {}, "the model has no plan"
    tied = {name for names in tied_parameters(model) for name in names}
    for name, block in blocks.items():
        plan = plan_of(block) or {}
        check_names(name, block, plan)
        for size, counted in sizes_of(name, block, plan):
            if size % tp:
                return {}, f"strategy.tp={tp} does not divide the {size} {counted}"
        for path, word in plan.items():
            if word in ("column", "heads", "row") and f"{name}.{path}.weight" in tied:
                return {}, f"{name}.{path} shares its weight with another layer"
    return blocks, ""


def check_plans(
    model: Chain, shapes: Sequence[torch.Size], tp: int, sequence_parallel: bool
) -> None:
    """Check that the model's blocks can be divided as their plans require.

    Args:
        model: the complete model.
        shapes: shape of one sample's activation before each block, without the batch dimension; and
            after the last one.
        tp: number of ranks that share a block.
        sequence_parallel: whether they share the tokens, too.

    Raises:
        ConfigError: no block has a plan, a plan does not fit its block, or something is not
            divisible by `tp`.
    """
    if sequence_parallel and tp == 1:
        raise ConfigError(
            "strategy.sequence_parallel=true: needs ranks along tp that share the tokens; use "
            "strategy.tp=2 or more"
        )

    blocks = dict(model.named_children())
    if not any(map(plan_of, blocks.values())):
        raise ConfigError(
            f"strategy.tp={tp}: no block of the model has a plan for tensor parallelism. Give the "
            "class of its blocks "
            f"({', '.join(dict.fromkeys(type(block).__name__ for block in blocks.values()))}) the "
            "attribute tensor_parallel, as in ddp_lab/models/vit.py: a dict from the names of "
            f"their modules to {', '.join(WORDS)}. Or use strategy=tp, which needs no plan"
        )

    if buffers := [name for name, _ in model.named_buffers()]:
        raise ConfigError(
            f"strategy.tp={tp}: does not support models with buffers, got {buffers[0]}. Use "
            "strategy=tp, or strategy.tp=1"
        )

    require_equal_words(model, tp)
    for (name, block), shape in zip(blocks.items(), shapes, strict=False):
        if plan := plan_of(block):
            check_names(name, block, plan)
            for size, counted in sizes_of(name, block, plan):
                if size % tp:
                    raise ConfigError(
                        f"strategy.tp={tp}: must divide the {size} {counted}; use one of their "
                        "divisors"
                    )
            if sequence_parallel and shape[0] % tp:
                raise ConfigError(
                    f"strategy.sequence_parallel=true: strategy.tp={tp} must divide the {shape[0]} "
                    f"tokens before {name}. Use strategy.sequence_parallel=false, or another "
                    "number of tokens: vit has one less with model.pool=mean"
                )


def check_names(name: str, block: nn.Module, plan: Mapping[str, str]) -> None:
    """Check that a plan names all modules with parameters, and linear layers by their words.

    Raises:
        ConfigError: it does not.
    """
    key = f"{type(block).__name__}.tensor_parallel"
    modules = dict(block.named_modules())
    for path, word in plan.items():
        if path not in modules:
            raise ConfigError(
                f"{key}: {name} has no module {path}; it has {', '.join(filter(None, modules))}"
            )
        linear = is_linear(modules[path])
        if word not in (WORDS if linear else WORDS[-2:]):
            if linear:
                allowed = f"one of {', '.join(WORDS)}"
            else:
                allowed = "tokens or gather, because it is no nn.Linear"
            raise ConfigError(f"{key}: {path} must be {allowed}, got {word}")

    covered = tuple(f"{path}." for path, word in plan.items() if word != "gather")
    if missing := [path for path, _ in block.named_parameters() if not path.startswith(covered)]:
        raise ConfigError(
            f"{key}: must name the module of the parameter {missing[0]}, as one of "
            f"{', '.join(WORDS[:-1])}"
        )


def require_equal_words(model: Chain, tp: int) -> None:
    """Check that layers with the same parameter are divided alike.

    Args:
        model: whose plans name modules of their blocks.
        tp: number of ranks that share a block.

    Raises:
        ConfigError: two are not.
    """
    words = {
        f"{name}.{path}": "column" if word == "heads" else word
        for name, block in model.named_children()
        for path, word in (plan_of(block) or {}).items()
        if word in ("column", "heads", "row")
    }
    for first, *others in tied_parameters(model):
        layer = first.rpartition(".")[0]
        for other in others:
            other_layer = other.rpartition(".")[0]
            if words.get(layer) != words.get(other_layer):
                raise ConfigError(
                    f"strategy.tp={tp}: {other} is the same parameter as {first}, which is divided "
                    f"otherwise: {layer} is {words.get(layer, 'not divided')}, {other_layer} is "
                    f"{words.get(other_layer, 'not divided')}. Change the plan, or use strategy=tp"
                )


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is torch's linear layer, with weights not computed from others."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and isinstance(module.weight, nn.Parameter)
    )


def sizes_of(name: str, block: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Yield each number that `tp` must divide in a block, and what it counts."""
    modules: dict[str, Any] = dict(block.named_modules())
    for path, word in plan.items():
        layer = modules[path]
        if word == "heads":
            yield (
                layer.out_features // modules[path.rpartition(".")[0]].head_width,
                f"heads of {name}.{path}",
            )
        elif word == "column":
            yield layer.out_features, f"units of {name}.{path}"
        elif word == "row":
            yield layer.in_features, f"inputs of {name}.{path}"
