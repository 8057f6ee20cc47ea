"""Parameters that a forward pass changes: where that is as on one device, and where it is refused.

| the strategy | what a forward pass writes to a parameter |
|---|---|
| computes with copies (fsdp, mesh, nn.DataParallel on several devices) | is lost |
| computes several micro-batches at once | is written several times in a step |
| shards the layer (tp) | would depend on the shard |
| has replicas (ddp, scratch) | must not depend on the samples, of which each replica has others |

A largest norm, a clamp and an average of other weights depend on weights alone. Under ddp every
replica then writes the same.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.trees import Tree, apply, to
from ddp_lab.models.calls import call
from ddp_lab.models.kept_state import state_kept
from ddp_lab.models.module_hooks import hook_of
from ddp_lab.models.trial import meta_copy
from ddp_lab.models.usage import Usage, find_usage, record

if TYPE_CHECKING:
    from ddp_lab.strategies.base import Strategy

# Of their classes only embeddings write to a parameter, with max_norm, which is refused by itself.
KNOWN = {"torch", "torchvision", "ddp_lab"}
REMEDY = (
    "Change it after the step, under torch.no_grad(); or compute the weight of a pass by a "
    "parametrization (torch.nn.utils.parametrize)"
)


def may_write(model: nn.Module) -> bool:
    """Return whether a forward pass runs code that is not known: other classes, or hooks."""
    modules = [*model.modules()]
    packages = {type(module).__module__.partition(".")[0] for module in modules}
    return not packages <= KNOWN or any(map(hook_of, modules))


@dataclass(frozen=True)
class Writes:
    """What forward passes write to parameters.

    Attributes:
        written: by the name of a parameter that a forward pass changes, the name of the module that
            does so; None: not known.
        may_come_later: whether the model has code that may change a parameter in a later pass.
        check_first: gets the inputs of the first local batch, of which the shapes were not known
            before; None: nothing is left to be checked.
    """

    written: Mapping[str, str] | None = field(default_factory=dict[str, str])
    may_come_later: bool = False
    check_first: Callable[[Tree], object] | None = None


def check_written(strategy: "Strategy", model: nn.Module) -> Writes:
    """Check that what a forward pass writes to parameters is as on one device, and return it.

    Two made-up samples find it. Without the shape of a sample, the first batch finds it, on the
    meta device.

    Args:
        strategy: in `partition`.
        model: complete.

    Raises:
        ConfigError: it is not the same, or that is not known.
    """
    if not may_write(model):
        return Writes()
    if strategy.example is None:
        check_first = None
        with suppress(Exception):  # some models cannot be copied
            check_first = partial(check_first_batch, strategy, meta_copy(model))
        return Writes(None, True, check_first)

    usage = find_usage(model, strategy.example)
    if usage is None:
        return Writes(None, True)
    if strategy.bucket_sizes or strategy.copies_weights:
        refuse_replaced(strategy, model, usage)
    refuse_lost(strategy, usage.written)
    if strategy.dp_size > 1 and usage.written:
        refuse_different(strategy, model, usage.written)
    return Writes(usage.written, True)


def check_first_batch(strategy: "Strategy", copy: nn.Module, inputs: Tree) -> None:
    """Check the same as `check_written`, as far as shapes alone show it.

    Args:
        strategy: after `setup`.
        copy: of the model, on the meta device.
        inputs: of a micro-batch.

    Raises:
        ConfigError: a parameter is written to, and is lost, or may differ between replicas.
    """
    written: Mapping[str, str] = {}
    # A model that reads values cannot run there.
    with suppress(Exception), state_kept(copy, weights=False):
        written = record(copy, to(inputs, "meta")).written
    refuse_lost(strategy, written)
    for name, module in written.items():
        if strategy.dp_size > 1 or strategy.axes.get("tp", 1) > 1:
            raise ConfigError(
                f"{describe(strategy, name, module)}. Whether every rank would write the same is "
                "found by a trial, which needs a sample: lab.trainer(..., example=dataset[0])"
            )


def refuse_lost(strategy: "Strategy", written: Mapping[str, str]) -> None:
    """Raise a ConfigError about a parameter whose change is lost, or is made too often."""
    for name, module in written.items():
        if strategy.copies_weights:
            raise ConfigError(
                f"{describe(strategy, name, module)}. The strategy computes with copies of the "
                f"parameters, so that the change would be lost. {REMEDY}; or use strategy=single "
                "or ddp"
            )
        if strategy.num_microbatches > 1:
            raise ConfigError(
                f"{describe(strategy, name, module)}, and so {strategy.num_microbatches} times in "
                "a step instead of once. Use strategy.num_microbatches=1, or another strategy, for "
                "example ddp"
            )


def refuse_replaced(strategy: "Strategy", model: nn.Module, usage: Usage) -> None:
    """Raise a ConfigError about a parameter in whose place a forward pass puts another one.

    The buckets of a strategy that reduces gradients during the backward pass would wait for the
    gradient of the first one. Where it is frozen, because the trial has not used it, they do not.
    """
    for name in sorted(usage.replaced):
        if model.get_parameter(name).requires_grad:
            raise ConfigError(
                f"{describe(strategy, name, usage.written[name], verb='replaces')} by another one, "
                "which neither the optimizer nor the strategy has. Change it in place, under "
                "torch.no_grad(); or use strategy=single, or strategy=scratch with "
                "strategy.algorithm=flat"
            )


def refuse_different(strategy: "Strategy", model: nn.Module, written: Mapping[str, str]) -> None:
    """Raise a ConfigError about a parameter to which replicas may write different values."""
    different = differing(model, written, strategy)
    for name, module in written.items():
        if different is None or name in different:
            why = (
                "depends on the samples of the batch or on random numbers, which replicas do not "
                "share"
            )
            if different is None:
                why = "may depend on the samples of the batch: a trial of it cannot run here"
            problem = f"{describe(strategy, name, module)}. What it writes {why}"
            raise ConfigError(f"{problem}. {REMEDY}; or use strategy=single")

        if strategy.find_unused_parameters:
            raise ConfigError(
                f"{describe(strategy, name, module)}. With strategy.find_unused_parameters=true a "
                "rank without a sample would not write. Use "
                "strategy.find_unused_parameters=false, or strategy=single"
            )


def refuse_sharded(strategy: "Strategy", layers: Iterable[str]) -> None:
    """Raise a ConfigError about the first parameter that is written to and whose layer is sharded.

    Args:
        strategy: in `partition`, after `check_written`.
        layers: names of the sharded layers.
    """
    sharded = {*layers}
    for name, module in (strategy.written or {}).items():
        if name.rpartition(".")[0] in sharded:
            raise ConfigError(
                f"{describe(strategy, name, module)}. The strategy shards this parameter, so that "
                f"the change may depend on the shard. {REMEDY}; or use strategy=single or ddp"
            )


def describe(strategy: "Strategy", name: str, module: str, verb: str = "changes") -> str:
    """Return the beginning of a message: which module changes which parameter."""
    where = f"the module {module}" if module else "the model"
    return f"strategy={strategy.name}: the forward pass of {where} {verb} the parameter {name}"


def drawn_like(draw: int, example: torch.Tensor) -> torch.Tensor:
    """Return samples in the form of an example: normal random numbers.

    If they have no fraction, all are the number of the draw.
    """
    values = torch.full((2 + draw, *example.shape[1:]), draw, dtype=example.dtype)
    return values.normal_(draw) if values.is_floating_point() else values


def differing(model: nn.Module, written: Iterable[str], strategy: "Strategy") -> set[str] | None:
    """Return which of the parameters get other values from other samples; None if it cannot run.

    Args:
        model: complete. Its state stays as it is.
        written: names of parameters.
        strategy: with an example.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    results: list[dict[str, torch.Tensor]] = []
    for draw in (0, 1):
        with suppress(Exception), state_kept(model):
            torch.manual_seed(draw)
            inputs = apply(partial(drawn_like, draw), strategy.example)
            call(model.train(), to(inputs, next(model.parameters()).device))
            results.append({name: model.get_parameter(name).detach().clone() for name in written})
    if len(results) < 2:
        return None
    first, other = results
    return {name for name, value in first.items() if not torch.equal(value, other[name])}
