"""The file that a command writes: never over another one by accident, and complete or not at all."""

import argparse
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ddp_lab.config.errors import ConfigError


def add_output(parser: argparse.ArgumentParser, text: str, required: bool) -> None:
    """Add --output and --force to a parser. `text` describes the file."""
    parser.add_argument("--output", type=Path, required=required, metavar="FILE", help=text)
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")


def check_output(path: Path, force: bool) -> None:
    """Check that a file may be written, before the work whose result it is.

    Raises:
        ConfigError: it exists and `force` is not set, or its directory does not exist or is not writable.
    """
    if path.is_dir() or (path.exists() and not force):
        raise ConfigError(f"--output {path}: already exists; use --force to replace a file, or another name")
    check_folder(path, "--output")


def check_folder(path: Path, option: str) -> None:
    """Check that a file can be written to a directory.

    Args:
        path: the file.
        option: what the user sets to the path, for the message.

    Raises:
        ConfigError: the directory does not exist or is not writable, or the file is a directory itself.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"{option} {path}: cannot be written: it is a directory")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: cannot be written: {folder} does not exist or is not writable")


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield the path of a temporary file, which replaces `path` at the end, or is removed after an error.

    Raises:
        ConfigError: the file cannot be written, for example because the disk is full.
    """
    temporary = path.with_name(f".{os.getpid()}.{path.name}")  # it keeps the suffix, by which some libraries choose the format
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written ({error.strerror or error})") from None
    finally:
        temporary.unlink(missing_ok=True)
