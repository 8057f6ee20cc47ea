"""An optimizer or a task of another class than that of conf/, which lacks options that conf/ sets.

Nobody has typed these options, so that they are left out. One that the user has set stays, and is
an error.
"""

from collections.abc import Sequence

from omegaconf import OmegaConf

from ddp_lab.config.build import OF_GROUPS, options
from ddp_lab.config.compose import CONF
from ddp_lab.config.errors import ConfigError
from ddp_lab.config.overrides import compose_choices, find_groups, is_choice, parse

# the groups, and the keys of each that are no options of its class
KEPT = {"optimizer": (*OF_GROUPS, "lr", "fused"), "task": ()}


def without_lacking(overrides: Sequence[str], config_dir: str | None) -> list[str]:
    """Return overrides, with those that remove the defaults that a class of the user's lacks.

    Args:
        overrides: Hydra overrides, checked.
        config_dir: The directory of the user's own yaml, if there is one.
    """
    removed = [
        f"~{group}.{name}" for group in KEPT for name in lacking_in(group, overrides, config_dir)
    ]
    return [*overrides, *removed]


def lacking_in(group: str, overrides: Sequence[str], config_dir: str | None) -> list[str]:
    """Return the options of a group that conf/ sets, nobody has typed, and its class lacks.

    Args:
        group: One of KEPT.
        overrides, config_dir: As in `without_lacking`.
    """
    parsed = [parse(override) for override in overrides]
    typed = {override.key_or_group for override in parsed}
    targets = [
        override.value()
        for override in parsed
        if override.key_or_group == f"{group}._target_" and not override.is_sweep_override()
    ]
    groups = find_groups(config_dir)
    choices = [override for override in parsed if is_choice(override, groups)]
    if not targets or any(override.is_sweep_override() for override in choices):
        return []
    try:
        schema = options(group, {"_target_": targets[-1]})
    except ConfigError:  # `check` reports it
        return []
    if schema.model_config.get("extra") == "allow":
        return []

    values, chosen = compose_choices([str(each.input_line) for each in choices], config_dir)
    path = CONF / group / f"{chosen[group]}.yaml"
    defaults = OmegaConf.load(path) if path.is_file() else {}
    return [
        str(name)
        for name, value in defaults.items()
        if not str(name).startswith("_")
        and name not in ("defaults", *KEPT[group])
        and name not in schema.model_fields
        and f"{group}.{name}" not in typed
        and values[group].get(name, ...) == value
    ]
