"""Config keys of the release before that have a new name, or were removed. Old names are accepted for one release."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf, open_dict

from ddp_lab.config.errors import ConfigError
from ddp_lab.world.process import env_int

RENAMED = {"data.shift": "data.crop_padding"}  # by the old name
REMOVED = {
    "strategy.balance": "name the first block of the second stage and of every later one by strategy.cut"
}  # with remedies
DEFAULTS = Path(__file__).parents[1] / "conf" / "config.yaml"


def rename_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line with the new names of keys, and warn of each old one.

    Args:
        arguments: Hydra overrides such as key=value and ~key, among other arguments.

    Raises:
        ConfigError: A key is given under both names, or was removed.
    """
    keys = [argument.partition("=")[0].lstrip("+~") for argument in arguments]
    renamed = list(arguments)
    for place, (old, argument) in enumerate(zip(keys, arguments, strict=True)):
        if old in REMOVED and "=" in argument:
            raise ConfigError(f"{argument.lstrip('+')}: was removed; {REMOVED[old]}")
        if old in RENAMED and ("=" in argument or argument.startswith("~")):
            if RENAMED[old] in keys:
                raise _both(old)
            renamed[place] = argument.replace(old, RENAMED[old], 1)
    warn(sorted(RENAMED.keys() & {key for key, one, other in zip(keys, arguments, renamed, strict=True) if one != other}))
    return renamed


def rename_keys(cfg: DictConfig) -> list[str]:
    """Move the values of old names to the new ones and drop removed keys, in place. Recorded configs and users' yaml have them.

    Returns:
        The old names that were found.

    Raises:
        ConfigError: A key has a value under both names, and that of the new name is not its default.
    """
    found: list[str] = []
    for old, new in (RENAMED | dict.fromkeys(REMOVED)).items():
        group, _, key = old.rpartition(".")
        node = OmegaConf.select(cfg, group) if group else cfg
        if not isinstance(node, DictConfig) or key not in node:
            continue
        if new is not None and OmegaConf.select(cfg, new) not in (None, OmegaConf.select(OmegaConf.load(DEFAULTS), new)):
            raise _both(old)
        value = cast("dict[str, Any]", OmegaConf.to_container(node))[key]  # a reference to another key remains one
        with open_dict(cfg):
            del node[key]
            if new is not None:
                OmegaConf.update(cfg, new, value, force_add=True)
        found.append(old)
    return found


def warn(names: Sequence[str]) -> None:
    """Print a warning for each old name, on rank 0."""
    for old in names if env_int("RANK", 0) == 0 else ():
        now = f"has no effect any more; {REMOVED[old]}" if old in REMOVED else f"is now called {RENAMED[old]}"
        until = "" if old in REMOVED else "; the old name is accepted until the next release"
        print(f"warning: {old} {now}{until}", file=sys.stderr, flush=True)


def _both(old: str) -> ConfigError:
    return ConfigError(f"{old}: is the old name of {RENAMED[old]}, which is given, too; remove {old}")
