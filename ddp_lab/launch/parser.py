"""The command line of the commands that open a trained run: evaluate, predict, export, merge."""

import argparse
from pathlib import Path
from typing import Any, NoReturn

from ddp_lab.config.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ConfigErrors, so that several ranks report them once.

    Args:
        command: how the command is started, for --help.
        text: the command's docstring.
        options: of ArgumentParser.
    """

    def __init__(self, command: str, text: str | None, **options: Any):
        super().__init__(prog=command, description=text, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def add_run(self, default: str = "auto") -> None:
        """Add the run directory and the checkpoint, with its default."""
        self.add_argument("run", type=Path, help="the run directory, runs/NAME")
        self.add_argument(
            "--checkpoint",
            default=default,
            metavar="auto|last|best|PATH",
            help=f"the newest one (last), the best one, or a path; auto: the best if a validation set chose it, else the newest"
            f" (default: {default})",
        )

    def add_overrides(self, help: str) -> None:
        """Add any number of overrides. Without the default, argparse would name them among the required arguments."""
        self.add_argument("overrides", nargs="*", default=[], help=help)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")
