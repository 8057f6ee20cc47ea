"""Parameter groups that a loop adds to the optimizer, by `add_param_group`."""

from collections.abc import Set
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ddp_lab.config.errors import ConfigError
from ddp_lab.strategies.base import Strategy


def adopt_groups(scheduler: LambdaLR, strategy: Strategy, known: Set[int]) -> None:
    """Let the schedule set the learning rate of added groups, too, by the factor of the first.

    Args:
        scheduler: of the optimizer, with fewer groups than it.
        strategy: that holds the parameters.
        known: identifiers of the parameters that the strategy has placed on the devices.

    Raises:
        ConfigError: a group has a parameter that the strategy does not know, on several ranks or
            with blocks of which it calls copies.
    """
    private: Any = scheduler
    groups: list[dict[str, Any]] = scheduler.optimizer.param_groups
    for group in groups[len(private.base_lrs) :]:
        parameters: list[nn.Parameter] = group["params"]
        for parameter in parameters:
            is_copied = strategy.replaces_parameters and strategy.calls_blocks
            is_divided = strategy.runtime.world_size > 1 or is_copied
            if is_divided and id(parameter) not in known:
                raise ConfigError(
                    f"optimizer.add_param_group: strategy={strategy.name} does not hold a "
                    f"parameter of shape {list(parameter.shape)} on rank {strategy.runtime.rank}, "
                    "so its gradients would not be summed over the ranks. Add only parameters that "
                    "trainer.strategy.module had at the beginning, or give them to the optimizer "
                    "in lab.trainer, frozen or not; or use strategy=single"
                )
        if groups[0].get("foreach") is False and "foreach" in group:  # set by tp
            group["foreach"] = False
        first = private.lr_lambdas[0]
        base = group.setdefault("initial_lr", group["lr"])
        private.base_lrs.append(base)
        private.lr_lambdas.append(first)
        if not getattr(scheduler, "set_by_loop", False):
            group["lr"] = base * first(scheduler.last_epoch)
