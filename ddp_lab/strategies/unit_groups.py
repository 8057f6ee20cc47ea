"""Where torch gathers a unit and sums its gradients, for which fully_shard has no public hooks."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn


def before_sum(unit: nn.Module, hook: Callable[[], None]) -> None:
    """Call a hook each time before torch sums the gradients of a sharded unit over the ranks.

    That is after the gradients of the unit's inputs, or at the end of the backward pass where they
    need none or are in an object that torch does not look into.
    """
    for group in groups_of(unit):
        group.post_backward = between(hook, group.post_backward)


def gather_before_backward(unit: nn.Module, outputs: Iterable[torch.Tensor]) -> None:
    """Let torch gather a sharded unit before the backward of outputs that it does not find itself.

    It would compute with parameters that have been freed.

    Args:
        unit: After its forward pass.
        outputs: Of the unit. More than one, or one that torch has found, are gathered for once.
    """
    state = cast("Any", unit)._get_fsdp_state()
    for output in outputs:
        output.register_hook(state._pre_backward)


def groups_of(unit: nn.Module) -> list[Any]:
    """Return torch's groups of parameters of a sharded unit: one if it has own parameters."""
    state = cast("Any", unit)._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.12 and later
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def between(hook: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a hook and then a function with the arguments."""

    def both(*arguments: Any) -> Any:
        hook()
        return then(*arguments)

    return both
