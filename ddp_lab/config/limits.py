"""What ends a run: its number of epochs, and the limits max_steps, max_tokens and max_minutes.

Importing this module lets OmegaConf resolve the default of `epochs` in conf/config.yaml, which
depends on the other limits.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from ddp_lab.config.errors import ConfigError

LIMITS = ("max_steps", "max_tokens", "max_minutes")  # besides `epochs`


def epochs_without_limit(default: int, *limits: float | None) -> int | None:
    """Return the default number of epochs; None, without end, if another limit ends the run."""
    return default if all(limit is None for limit in limits) else None


OmegaConf.register_new_resolver("epochs_without_limit", epochs_without_limit, replace=True)


def check_limits(values: Mapping[str, Any]) -> None:
    """Check that a run has an end, and that its warm-up is given once.

    Args:
        values: the config's values by key.

    Raises:
        ConfigError: it has none, or the warm-up is given twice.
    """
    if values["epochs"] is None and all(values.get(key) is None for key in LIMITS):
        raise ConfigError(
            "epochs=null: the run would have no end. Set epochs, or one of max_steps, max_tokens "
            "and max_minutes"
        )
    steps = values.get("warmup_steps")
    if steps is not None and values["warmup_epochs"]:
        raise ConfigError(
            f"warmup_steps={steps}: warmup_epochs={values['warmup_epochs']:g} is set, too. Use one "
            "of them"
        )
