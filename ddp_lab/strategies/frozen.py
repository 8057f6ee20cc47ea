"""Parameters that a loop freezes or unfreezes after `setup`, by `requires_grad_`.

Where gradients are sent during the backward pass, it is decided before a step which ones are. One
of a parameter that was frozen then would not be sent, so that the replicas drift apart; one of a
parameter that is frozen now would be waited for.
"""

from collections.abc import Generator
from contextlib import contextmanager
from operator import attrgetter

from torch import nn

from ddp_lab.config.errors import TrainingError
from ddp_lab.strategies.base import Strategy

IS_TRAINED = attrgetter("requires_grad")


class FrozenParameters:
    """Notices that other parameters are frozen than before.

    Args:
        strategy: with its `module`.
    """

    def __init__(self, strategy: Strategy):
        self.strategy = strategy
        named = [*strategy.module.named_parameters()]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._before = self._now()

    def _now(self) -> list[bool]:
        """Return whether each parameter is trained. It takes below 0.1 us per parameter."""
        return [*map(IS_TRAINED, self._parameters)]

    def changed_before_step(self) -> bool:
        """Return whether others are frozen than at the call before, or at the beginning."""
        if self._now() == self._before:
            return False
        # Those that the trial has not used stay frozen outside of a step (idle.py).
        for parameter in self.strategy.watched.values():
            parameter.requires_grad_(False)
        before = self._before
        self._before = self._now()
        return self._before != before

    def require_same_in_step(self) -> None:
        """Check that the step has changed none.

        Raises:
            TrainingError: a forward pass has frozen or unfrozen a parameter; on this rank.
        """
        now = self._now()
        if now == self._before:
            return
        for name, is_trained, was_trained in zip(self._names, now, self._before, strict=True):
            if is_trained != was_trained:
                change = "unfrozen" if is_trained else "frozen"
                raise TrainingError(
                    f"strategy={self.strategy.name}: the parameter {name} was {change} "
                    "(requires_grad) in a forward pass, after it was decided which gradients this "
                    "step sends. Freeze and unfreeze parameters between steps, or use "
                    "strategy=scratch with strategy.algorithm=flat",
                    rank=self.strategy.runtime.rank,
                )


@contextmanager
def without_gradients(strategy: Strategy) -> Generator[None]:
    """Let backward passes of the body pass through a model, whose own gradients stay.

    Args:
        strategy: with its `module`.
    """
    if strategy.sharded:
        with gradients_dropped(strategy):
            yield
        return
    trained = [parameter for parameter in strategy.module.parameters() if parameter.requires_grad]
    set_trained(trained, False)
    try:
        yield
    finally:
        set_trained(trained, True)


def set_trained(parameters: list[nn.Parameter], is_trained: bool) -> None:
    """Set whether gradients of the parameters are computed."""
    for parameter in parameters:
        parameter.requires_grad_(is_trained)


@contextmanager
def gradients_dropped(strategy: Strategy) -> Generator[None]:
    """Drop the gradients that the body computes of a model, and restore those of before.

    Gathered parameters keep the `requires_grad` that they had when they were gathered first.
    """
    parameters = [*strategy.module.parameters()]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        strategy.forget_passes()
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
