"""Hooks of users on parameters: called once in a step, or refused.

autograd calls the hooks of a parameter whenever a backward pass arrives there: on each rank with
the gradient of its local batch, and in a pipeline with that of each micro-batch. A hook that clips
its gradient would then depend on the strategy. They are therefore called at the end of a step
instead, with the gradient of the GLOBAL batch.
"""

from collections.abc import Callable, Set
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import has_hooks

if TYPE_CHECKING:
    from ddp_lab.strategies.base import Strategy


class Later:
    """A hook of the user that does nothing when autograd calls it."""

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor | None]):
        self.hook = hook

    def __call__(self, _: torch.Tensor) -> None:
        """Do nothing."""


class OfStrategy:
    """A hook that a strategy may register at any time, and that autograd calls."""

    def __init__(self, hook: Callable[[torch.Tensor], object]):
        self.hook = hook

    def __call__(self, tensor: torch.Tensor) -> None:
        self.hook(tensor)


class Hooked(NamedTuple):
    """A parameter and its hooks, in torch's own dicts.

    So the handle of a hook still removes it.

    Attributes:
        module: that has the parameter, which moving to a device may replace.
        name: of the parameter in the module.
        on_gradient: hooks of `register_hook`, which may return another gradient.
        on_parameter: hooks of `register_post_accumulate_grad_hook`.
    """

    module: nn.Module
    name: str
    on_gradient: dict[int, Any]
    on_parameter: dict[int, Any]


# of a hook: its parameter, its kind, and its number in the dict of torch
Key = tuple[int, int, int]


def take_hooks(model: nn.Module, known: Set[Key] = frozenset()) -> list[Hooked]:
    """Let autograd leave out the hooks of a model's parameters, and return them.

    A strategy may then add its own.

    Args:
        model: of the user, or what the strategy has made of it.
        known: hooks of the strategy, which autograd calls.
    """
    taken = list[Hooked]()
    seen = set[nn.Parameter]()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen or not has_hooks(parameter):
                continue
            seen.add(parameter)
            private: Any = parameter
            kinds = private._backward_hooks or {}, private._post_accumulate_grad_hooks or {}
            for kind, hooks in enumerate(kinds):
                for key, hook in hooks.items():
                    # of another trainer
                    is_known = (id(parameter), kind, key) in known
                    if not is_known and not isinstance(hook, (Later, OfStrategy)):
                        hooks[key] = Later(hook)
            taken.append(Hooked(module, name, *kinds))
    return taken


@torch.no_grad()
def call_hooks(taken: list[Hooked]) -> None:
    """Call the hooks of the parameters that have a gradient, which is that of the GLOBAL batch."""
    for module, name, on_gradient, on_parameter in taken:
        parameter: nn.Parameter = getattr(module, name)
        if parameter.grad is None:  # not used in this step
            continue
        for hook in later(on_gradient):
            changed = hook(parameter.grad)
            if changed is not None:
                parameter.grad.copy_(changed)  # in place, because it may be part of a bucket
        for hook in later(on_parameter):
            hook(parameter)


def later(hooks: dict[int, Any]) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """Return the hooks that autograd has left out."""
    return [each.hook for each in hooks.values() if isinstance(each, Later)]


class LateHooks:
    """Finds hooks that are registered after a strategy has placed the model, and moves them, too.

    They then run at the end of a step.

    Args:
        strategy: after `setup`.
        model: of the user.
    """

    def __init__(self, strategy: "Strategy", model: nn.Module):
        self.strategy = strategy
        self._model = model
        self._of_strategy = keys_of(strategy.module, is_later=False)
        self._seen = keys_of(strategy.module)

    def take(self) -> None:
        """Take what was registered since the last call. Collective; call it before steps are taken.

        Raises:
            ConfigError: the strategy has replaced the parameters by shards; on all ranks. Or the
                model itself has a hook, and the strategy calls its blocks only.
        """
        self.require_none_on_model()
        module = self.strategy.module
        present = keys_of(module)
        late = {parameter for parameter, _, _ in present - self._seen}
        self._seen |= present
        if self.strategy.replaces_parameters:
            names = [name for name, parameter in module.named_parameters() if id(parameter) in late]
            self.strategy.runtime.gather_and_decide("late hooks", names, self._refuse)
        elif late:
            self.strategy.take_parameter_hooks(module, self._of_strategy)

    def require_none_on_model(self) -> None:
        """Check that the model itself has no hook, if the strategy calls its blocks only.

        Raises:
            ConfigError: it has one, which would never be called.
        """
        self.strategy.require_called_hooks(self._model)

    def _refuse(self, names_of_ranks: list[list[str]]) -> None:
        """Raise the error about the first parameter of all ranks, if there is one."""
        for name in chain.from_iterable(names_of_ranks):
            raise hook_error(name, self.strategy.name)


def keys_of(module: nn.Module, is_later: bool = True) -> set[Key]:
    """Return the hooks of a model's parameters.

    Args:
        module: the model.
        is_later: whether those count that autograd leaves out.
    """
    keys: set[Key] = set()
    for parameter in module.parameters():
        private: Any = parameter
        for kind, hooks in enumerate(
            (private._backward_hooks, private._post_accumulate_grad_hooks)
        ):
            for key, hook in (hooks or {}).items():
                if isinstance(hook, OfStrategy):
                    continue
                if is_later or not isinstance(hook, Later):
                    keys.add((id(parameter), kind, key))
    return keys


def require_no_hooks(model: nn.Module, strategy: str) -> None:
    """Check that no parameter has a hook on its gradient.

    Args:
        model: before its parameters are replaced by shards.
        strategy: for the message.

    Raises:
        ConfigError: a parameter has one.
    """
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            raise hook_error(name, strategy)


def hook_error(name: str, strategy: str) -> ConfigError:
    """Return the error about a hook on the parameter of this name."""
    return ConfigError(
        f"strategy={strategy}: shards the parameter {name}, which has a hook (register_hook or "
        "register_post_accumulate_grad_hook) that would be lost. Remove the hook, or use a "
        "strategy that keeps it, for example ddp or pipeline"
    )
