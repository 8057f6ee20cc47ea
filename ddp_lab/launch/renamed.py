"""Config keys that had another name in the release before. The old name is accepted for one release, with a warning."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf, open_dict

from ddp_lab.config.errors import ConfigError
from ddp_lab.world.process import env_int

RENAMED = {"data.shift": "data.crop_padding"}  # by the old name
DEFAULTS = Path(__file__).parents[1] / "conf" / "config.yaml"


def rename_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line with the new names of keys, and warn of each old one.

    Args:
        arguments: Hydra overrides such as key=value and ~key, among other arguments.

    Raises:
        ConfigError: A key is given under both names.
    """
    keys = [argument.partition("=")[0].lstrip("+~") for argument in arguments]
    renamed = list(arguments)
    for place, (old, argument) in enumerate(zip(keys, arguments, strict=True)):
        if old in RENAMED and ("=" in argument or argument.startswith("~")):
            if RENAMED[old] in keys:
                raise _both(old)
            renamed[place] = argument.replace(old, RENAMED[old], 1)
    warn(sorted(RENAMED.keys() & {key for key, one, other in zip(keys, arguments, renamed, strict=True) if one != other}))
    return renamed


def rename_keys(cfg: DictConfig) -> list[str]:
    """Move the values of old names to the new ones, in place. Recorded configs have old names, and users' own yaml may.

    Returns:
        The old names that were found.

    Raises:
        ConfigError: A key has a value under both names, and that of the new name is not its default.
    """
    found: list[str] = []
    for old, new in RENAMED.items():
        group, _, key = old.rpartition(".")
        node = OmegaConf.select(cfg, group) if group else cfg
        if not isinstance(node, DictConfig) or key not in node:
            continue
        if OmegaConf.select(cfg, new) not in (None, OmegaConf.select(OmegaConf.load(DEFAULTS), new)):
            raise _both(old)
        value = cast("dict[str, Any]", OmegaConf.to_container(node))[key]  # a reference to another key remains one
        with open_dict(cfg):
            del node[key]
            OmegaConf.update(cfg, new, value, force_add=True)
        found.append(old)
    return found


def warn(names: Sequence[str]) -> None:
    """Print a warning for each old name, on rank 0."""
    for old in names if env_int("RANK", 0) == 0 else ():
        text = f"warning: {old} is now called {RENAMED[old]}; the old name is accepted until the next release"
        print(text, file=sys.stderr, flush=True)


def _both(old: str) -> ConfigError:
    return ConfigError(f"{old}: is the old name of {RENAMED[old]}, which is given, too; remove {old}")
