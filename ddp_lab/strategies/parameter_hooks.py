"""Hooks of users on parameters, which do not survive where a strategy replaces the parameters."""

from torch import nn

from ddp_lab.config.errors import ConfigError


def require_no_hooks(model: nn.Module, strategy: str) -> None:
    """Check that no parameter has a hook on its gradient.

    Args:
        model: before its parameters are replaced by shards.
        strategy: for the message.

    Raises:
        ConfigError: a parameter has one.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # pyright: ignore
            raise ConfigError(
                f"strategy={strategy}: shards the parameter {name}, which has a hook (register_hook or "
                "register_post_accumulate_grad_hook) that would be lost. Remove the hook, or use a strategy "
                "that keeps it: single, scratch or ddp"
            )
