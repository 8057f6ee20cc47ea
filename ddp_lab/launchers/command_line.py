"""The config of a command line, and messages for overrides that Hydra rejects."""

import argparse
import re

from omegaconf import DictConfig

from ddp_lab.config.compose import compose
from ddp_lab.config.overrides import HELP, check_overrides


def quote_faults(arguments: list[str]) -> list[str]:
    """Return the arguments with the value of `inject` in quotes.

    Hydra would read its comma as a sweep over two values.
    """
    fault = re.compile(r"^inject=(\w+@[\w=,]+)$")
    return [fault.sub(r'inject="\1"', argument) for argument in arguments]


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
    return compose(overrides, config_dir, with_choices)


def explain(error: Exception) -> str:
    """Return a one-line message for an error of Hydra that `check_overrides` does not foresee."""
    text = " ".join(str(error).split())
    without_link = text.partition(" See https")[0]
    return f"{without_link}. {HELP}"
