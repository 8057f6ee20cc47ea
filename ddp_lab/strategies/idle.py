"""Parameters that the trial of a model has not used, and that a later step may use nevertheless.

A model may switch a part on after some epochs. Where steps may leave parameters unused, such a part
is trained from then on, as on one device. Data parallelism that waits for every gradient has frozen
the parameters instead. Then the first step that would train one of them ends with a message.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from torch import nn

from ddp_lab.config.errors import TrainingError
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.unused import remedy_of


def watch_idle(strategy: Strategy) -> dict[str, nn.Parameter]:
    """Let steps report that they use a parameter which is frozen because the trial has not used it.

    Args:
        strategy: after `setup`.

    Returns:
        These parameters of this rank, by name.
    """
    watched: dict[str, nn.Parameter] = {}
    for name, parameter in strategy.module.named_parameters():
        if name in strategy.idle:
            watched[name] = parameter
            parameter.requires_grad_()  # only then it may have hooks
            parameter.register_post_accumulate_grad_hook(partial(refuse, strategy, name))
            parameter.requires_grad_(False)
    return watched


@contextmanager
def uses_reported(strategy: Strategy) -> Generator[None]:
    """Raise a TrainingError if the body, a step, computes the gradient of a watched parameter."""
    for parameter in strategy.watched.values():
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in strategy.watched.values():
            parameter.requires_grad_(False)


def refuse(strategy: Strategy, name: str, parameter: nn.Parameter) -> NoReturn:
    """Raise a TrainingError about a watched parameter that has got a gradient."""
    parameter.grad = None
    rank = strategy.runtime.rank
    raise TrainingError(
        f"strategy={strategy.name}: the parameter {name} got a gradient in a step on rank {rank}. "
        "The trial of the model has not used it, so it was frozen. If only some steps use it, "
        f"{remedy_of(strategy)}, or strategy=fsdp. If it must not be trained, freeze it by "
        "requires_grad_(False)",
        rank=rank,
    )
