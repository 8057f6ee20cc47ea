"""An optimizer of another class than that of conf/, which lacks options that conf/ sets.

Nobody has typed these options, so that they are left out. One that the user has set stays, and is
an error.
"""

from collections.abc import Sequence

from omegaconf import OmegaConf

from ddp_lab.config.build import OF_GROUPS, options
from ddp_lab.config.compose import CONF
from ddp_lab.config.errors import ConfigError
from ddp_lab.config.overrides import compose_choices, find_groups, is_choice, parse

KEY = "optimizer._target_"


def without_lacking(overrides: Sequence[str], config_dir: str | None) -> list[str]:
    """Return overrides, with those that remove the defaults that the optimizer's class lacks.

    Args:
        overrides: Hydra overrides, checked.
        config_dir: The directory of the user's own yaml, if there is one.
    """
    parsed = [parse(override) for override in overrides]
    typed = {override.key_or_group for override in parsed}
    targets = [
        override.value()
        for override in parsed
        if override.key_or_group == KEY and not override.is_sweep_override()
    ]
    groups = find_groups(config_dir)
    choices = [override for override in parsed if is_choice(override, groups)]
    if not targets or any(override.is_sweep_override() for override in choices):
        return [*overrides]
    try:
        schema = options("optimizer", {"_target_": targets[-1]})
    except ConfigError:  # `check` reports it
        return [*overrides]
    if schema.model_config.get("extra") == "allow":
        return [*overrides]

    values, chosen = compose_choices([str(each.input_line) for each in choices], config_dir)
    path = CONF / "optimizer" / f"{chosen['optimizer']}.yaml"
    defaults = OmegaConf.load(path) if path.is_file() else {}
    lacking = [
        name
        for name, value in defaults.items()
        if not str(name).startswith("_")
        and name not in (*OF_GROUPS, "lr", "fused")
        and name not in schema.model_fields
        and f"optimizer.{name}" not in typed
        and values["optimizer"].get(name, ...) == value
    ]
    return [*overrides, *(f"~optimizer.{name}" for name in lacking)]
