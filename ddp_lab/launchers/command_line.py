"""The config of a command line."""

import argparse

from omegaconf import DictConfig

from ddp_lab.config.compose import compose
from ddp_lab.config.overrides import check_overrides, for_own_classes


def split_config_dir(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the value of --config-dir (directory of the user's yaml) and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir")
    known, others = parser.parse_known_args(arguments)
    return known.config_dir, others


def compose_config(
    overrides: list[str], config_dir: str | None, with_choices: bool = False
) -> DictConfig:
    """Return the config of a command line. The arguments are those of `compose`.

    Raises:
        ConfigError: An override is not allowed, or there is no such directory.
    """
    check_overrides(overrides, config_dir)
    return compose(for_own_classes(overrides, config_dir), config_dir, with_choices)
