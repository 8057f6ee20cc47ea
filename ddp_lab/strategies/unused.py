"""Parameters that a step does not use on every rank: their gradient, or an error.

| a step has used the parameter | its gradient, on every rank |
|---|---|
| on no rank | None: the optimizer leaves it as it is, as on one device |
| on some ranks | the sum, to which the other ranks add zeros |

torch's DistributedDataParallel does the same with find_unused_parameters=True.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.config.errors import ConfigError, TrainingError, describe_error
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.contiguous import in_memory_order
from ddp_lab.strategies.gradients import trainable

# Why steps that may leave parameters unused exclude performance options (`Strategy.unsupported`).
SAME_PARAMETERS = {
    "cuda_graph": "a captured step always uses the same parameters, and those of "
    "strategy.find_unused_parameters=true do not",
    "compile": "compiled steps of strategy.find_unused_parameters=true were never tested",
}


def unsupported_with_unused(strategy: Strategy) -> dict[str, str]:
    """Return what a strategy does not support if only some steps use a parameter, and why.

    Args:
        strategy: in its constructor; without find_unused_parameters it supports everything.

    Raises:
        ConfigError: BatchNorm is synchronised. A rank whose batch skips such a layer would leave
            the others waiting in the layer's collective.
    """
    if not strategy.find_unused_parameters:
        return {}
    if strategy.batch_norm == "sync":
        raise ConfigError(
            "strategy.batch_norm=sync: is not supported with strategy.find_unused_parameters=true, "
            "because ranks that skip a layer would leave the others waiting for its statistics. "
            "Use strategy.batch_norm=local"
        )
    return SAME_PARAMETERS


@contextmanager
def every_gradient(strategy: Strategy) -> Generator[None]:
    """Let each parameter that is not frozen have a gradient in the body, which sums them.

    Collective.

    If steps may leave parameters unused, a bitmap of the used ones is combined after the body, one
    bit for each parameter. Only a rank that has not used one waits for it, and so for its device:
    it has to know whether another rank has.

    Args:
        strategy: after the backward pass. All ranks of `dp_group` have the same parameters.

    Raises:
        TrainingError: a rank has not used a parameter, and the strategy does not expect it. On CPUs
            it is raised on all ranks. On GPUs the other ranks would have to wait for the device in
            every step, so they are ended with this one.
    """
    expected = strategy.may_leave_unused
    on_cpu = strategy.device.type == "cpu"
    parameters = [*trainable(strategy.module.parameters())]
    unused = [parameter for parameter in parameters if parameter.grad is None]
    if not expected and not on_cpu:
        refuse_unused(strategy)
    for parameter in unused:
        parameter.grad = zeros_like_gradient(parameter)
    yield
    if expected:
        forget_unused(strategy, parameters, unused)
    elif on_cpu:
        refuse_unused_anywhere(strategy, unused)


def zeros_like_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return zeros in the layout of a gradient: a parameter's with elements side by side."""
    if in_memory_order(parameter).is_contiguous():
        return torch.zeros_like(parameter)
    return torch.zeros_like(parameter, memory_format=torch.contiguous_format)


def forget_unused(
    strategy: Strategy, parameters: Sequence[nn.Parameter], unused: Sequence[nn.Parameter]
) -> None:
    """Remove the gradients of the parameters that no rank has used. Collective.

    Args:
        strategy: of the parameters.
        parameters: those that are not frozen.
        unused: those of them that this rank has not used.
    """
    if strategy.dp_size == 1:
        for parameter in unused:
            parameter.grad = None
        return
    here = {id(parameter) for parameter in unused}
    bits = [id(parameter) not in here for parameter in parameters]
    used = torch.tensor(bits, dtype=torch.int32, device=strategy.device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=strategy.dp_group)
    if unused:
        for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
            if not anywhere:
                parameter.grad = None


def refuse_unused(strategy: Strategy) -> None:
    """Raise a TrainingError if this rank has not used a parameter in the step. Not collective."""
    for name, parameter in strategy.module.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise unused_error(strategy, name, strategy.runtime.rank)


def refuse_unused_anywhere(strategy: Strategy, unused: Sequence[nn.Parameter]) -> None:
    """Raise the same TrainingError on all ranks if one has not used a parameter. Collective.

    Args:
        strategy: of the parameters.
        unused: the parameters that this rank has not used.
    """
    runtime = strategy.runtime
    if runtime.on_any_rank(bool(unused)):
        names = {id(parameter): name for name, parameter in strategy.module.named_parameters()}
        first = names[id(unused[0])] if unused else ""
        rank, name = runtime.gather_and_decide("unused parameter", first, first_named)
        raise unused_error(strategy, name, rank)


def first_named(names: list[str]) -> list[Any]:
    """Return the first rank that has given a name, and the name."""
    rank = next(rank for rank, name in enumerate(names) if name)
    return [rank, names[rank]]


def remedy_of(strategy: Strategy) -> str:
    """Return what to use if only some steps use a parameter, for a message."""
    key = "strategy.find_unused_parameters=true"
    if strategy.find_unused_parameters is None:
        return f"use strategy=ddp or strategy=scratch with {key}"
    return f'use {key}, in a Lab Lab("{strategy.name}", find_unused_parameters=True)'


def unused_error(strategy: Strategy, name: str, rank: int) -> TrainingError:
    """Return the error about a parameter that a rank has not used in a step."""
    return TrainingError(
        f"strategy={strategy.name}: the parameter {name} got no gradient in a step on rank {rank}. "
        f"If only some steps use it, {remedy_of(strategy)}. If none does, freeze it by "
        "requires_grad_(False); a Lab does this for you if it gets a sample: lab.trainer(..., "
        "example=dataset[0])",
        rank=rank,
    )


def empty_error(strategy: Strategy, error: Exception) -> TrainingError:
    """Return the error about a model that does not train on an empty batch, with its cause."""
    rank = strategy.runtime.rank
    return TrainingError(
        f"strategy={strategy.name}: strategy.find_unused_parameters=true needs a model that trains "
        f"on empty batches, and rank {rank} has no sample of this batch or gradient-accumulation "
        f"step: {describe_error(error)}. Use strategy=scratch, which does not call the model then, "
        "or strategy=fsdp, which calls it with a sample that does not count; or a batch_size and "
        "accumulate with which each rank has a sample in each step of the last batch of an epoch",
        rank=rank,
    )
