"""Hooks of users on the model itself, which are called where the model is."""

from typing import Any

from torch import nn

from ddp_lab.config.errors import ConfigError

# By the attribute of a module that keeps them.
REGISTERED_BY = {
    "_forward_hooks": "register_forward_hook",
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}


def hook_of(module: nn.Module) -> str:
    """Return the name of a method that registered a hook on a module; "" if it has none."""
    private: Any = module
    return next(
        (method for attribute, method in REGISTERED_BY.items() if getattr(private, attribute)), ""
    )


def require_no_hook(model: nn.Module, strategy: str) -> None:
    """Check that a model which is cut into blocks has no hook of its own.

    Args:
        model: of which only the blocks are called.
        strategy: for the message.

    Raises:
        ConfigError: it has one.
    """
    if method := hook_of(model):
        raise ConfigError(
            f"strategy={strategy}: calls the blocks of the model and not the model itself, which "
            f"has a hook ({method}) that would never be called. Register it on the first or the "
            "last block, or use another strategy, for example ddp"
        )
