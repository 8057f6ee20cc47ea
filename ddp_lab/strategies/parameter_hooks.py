"""Hooks of users on parameters: called once in a step, or refused.

autograd calls the hooks of a parameter whenever a backward pass arrives there: on each rank with
the gradient of its local batch, and in a pipeline with that of each micro-batch. A hook that clips
its gradient would then depend on the strategy. They are therefore called at the end of a step
instead, with the gradient of the GLOBAL batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.strategies.parameters import has_hooks


class Later:
    """A hook of the user that does nothing when autograd calls it."""

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor | None]):
        self.hook = hook

    def __call__(self, _: torch.Tensor) -> None:
        """Do nothing."""


class Hooked(NamedTuple):
    """A parameter and its hooks, in the dicts in which torch keeps them, so that the handle of a hook still removes it.

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


def take_hooks(model: nn.Module) -> list[Hooked]:
    """Let autograd leave out the hooks of a model's parameters, and return them. A strategy may then add its own."""
    taken = list[Hooked]()
    seen = set[nn.Parameter]()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen or not has_hooks(parameter):
                continue
            seen.add(parameter)
            private: Any = parameter
            kinds = private._backward_hooks or {}, private._post_accumulate_grad_hooks or {}
            for hooks in kinds:
                for key, hook in hooks.items():
                    hooks[key] = hook if isinstance(hook, Later) else Later(hook)  # of another trainer of the model
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
            raise ConfigError(
                f"strategy={strategy}: shards the parameter {name}, which has a hook (register_hook or "
                "register_post_accumulate_grad_hook) that would be lost. Remove the hook, or use a strategy "
                "that keeps it, for example ddp or pipeline"
            )
