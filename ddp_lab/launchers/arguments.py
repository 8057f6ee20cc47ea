"""The command line of the commands that do not train: arguments, questions, and output."""

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ddp_lab.config.errors import ConfigError
from ddp_lab.world.process import env_int


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ConfigErrors, so that several ranks report them once.

    Args:
        command: how the command is started, for --help.
        text: the command's docstring.
        options: of ArgumentParser.
    """

    def __init__(self, command: str, text: str | None, **options: Any):
        super().__init__(
            prog=command,
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )

    def add_run(self, default: str = "auto") -> None:
        """Add the run directory and the checkpoint, with its default."""
        from ddp_lab.launchers.run_names import run_directory

        text = "the run: its directory, or its name in runs"
        self.add_argument("run", type=run_directory, help=text)
        self.add_argument(
            "--checkpoint",
            default=default,
            metavar="auto|last|best|PATH",
            help="the newest one (last), the best one, or a path; auto: the best if a validation "
            f"set chose it, else the newest (default: {default})",
        )

    def add_config_dir(self) -> None:
        """Add the directory with the user's own choices of config groups."""
        self.add_argument(
            "--config-dir", metavar="DIR", help="directory of your own yaml, for choices of a group"
        )

    def add_overrides(self, help: str) -> None:
        """Add any number of overrides.

        Without the default, argparse would name them among the required arguments.
        """
        self.add_argument("overrides", nargs="*", default=[], help=help)

    def add_output(self, text: str, required: bool) -> None:
        """Add --output and --force. `text` describes the file."""
        self.add_argument("--output", type=Path, required=required, metavar="FILE", help=text)
        self.add_argument("--force", action="store_true", help="replace the file if it exists")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def refuse_ranks(command: str) -> None:
    """Check that torchrun has not started this process as one of several ranks.

    Args:
        command: for the message.

    Raises:
        ConfigError: it has.
    """
    if env_int("WORLD_SIZE", 1) > 1:
        raise ConfigError(f"{command}: runs in one process; start it without torchrun")


def confirm(question: str, yes: bool) -> None:
    """Ask before something that cannot be undone, unless `yes`. No answer is a no.

    Raises:
        SystemExit: the answer is not yes; the exit code is 1.
    """
    if not yes:
        print(f"{question} [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing is done")
            sys.exit(1)


def installed(package: str) -> str:
    """Return the name and the version of a package; a clone of ddp_lab need not be installed."""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} (not installed)"


def check_output(path: Path, force: bool) -> None:
    """Check that a file may be written, before the work whose result it is.

    Raises:
        ConfigError: it exists and `force` is not set, or its directory does not exist or is not
            writable.
    """
    if path.is_dir() or (path.exists() and not force):
        raise ConfigError(
            f"--output {path}: already exists; use --force to replace a file, or another name"
        )
    check_folder(path, "--output")


def check_folder(path: Path, option: str) -> None:
    """Check that a file can be written to a directory.

    Args:
        path: the file.
        option: what the user sets to the path, for the message.

    Raises:
        ConfigError: the directory does not exist or is not writable, or the file is a directory
            itself.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"{option} {path}: cannot be written: it is a directory")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{option} {path}: cannot be written: {folder} does not exist or is not writable"
        )


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield the path of a temporary file that replaces `path` at the end; an error removes it.

    Raises:
        ConfigError: the file cannot be written, for example because the disk is full.
    """
    # it keeps the suffix, by which some libraries choose the format
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    with write_errors(path):
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def write_errors(path: Path, option: str = "--output") -> Generator[None]:
    """Report what keeps the body from writing a file as a ConfigError.

    Args:
        path: The file. What the body has written of it must be removed when it raises an error.
        option: What the user has set to the path.

    Raises:
        ConfigError: The operating system refuses to write it; the error may be one of torch or of
            safetensors that this caused.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        from ddp_lab.world.write_errors import explain_write, system_error

        if system_error(error) is None:
            raise
        reason, remedy = explain_write(error, path.absolute().parent)
        raise ConfigError(f"{option} {path}: cannot be written ({reason}). {remedy}") from None
