"""A checkpoint's file and its hash: written whole or not at all, checked, and read without running what is in it."""

import hashlib
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ddp_lab.config.errors import ConfigError


def in_order(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: (len(path.name), path.name))


def digest_of(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, state: dict[str, Any], temporary: Path | None = None) -> None:
    """The file appears under its name only when it is on the disk, and counts only when its hash is, too.

    Args:
        temporary: where it is written before it is renamed; None: beside `path`.

    Raises:
        OSError, RuntimeError: it cannot be written; then nothing of it is left.
    """
    temporary = temporary or path.with_suffix(".tmp")
    digest = path.with_suffix(".sha256.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        with digest.open("w") as file:
            file.write(f"{sha256(temporary)}  {path.name}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        os.replace(digest, digest_of(path))
    finally:
        if temporary.is_file():
            temporary.unlink()
        digest.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def damage(path: Path) -> str | None:
    """Why the file is not what was written; None where it is."""
    try:
        expected = digest_of(path).read_text().split()[0]
    except (OSError, IndexError, ValueError):
        return f"{digest_of(path).name} is missing or damaged"
    try:
        return None if sha256(path) == expected else "its SHA-256 is another than when it was written"
    except OSError as error:
        return str(error)


def load_checkpoint(path: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Reads a checkpoint for a model with these tensors; tensors and plain values only, so a malicious file cannot run code.

    Raises:
        ConfigError: damaged, not a checkpoint of this project, or of another model: names the first tensor that differs.
    """
    if digest_of(Path(path)).exists() and (problem := damage(Path(path))):
        raise ConfigError(f"resume={path}: is damaged: {problem}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        missing = {"progress", "seed", "model", "optimizer", "scheduler"} - state.keys()
    except (RuntimeError, OSError, EOFError, AttributeError, KeyError, ValueError, pickle.UnpicklingError) as error:
        reason = f"{type(error).__name__} {error}".split("\n")[0]
        raise ConfigError(f"resume={path}: cannot be read as a checkpoint ({reason})") from None
    if missing:
        raise ConfigError(f"resume={path}: is no checkpoint of ddp_lab; it lacks {', '.join(sorted(missing))}")
    saved = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
    for name in [*shapes, *saved]:
        here, there = shapes.get(name, "missing"), saved.get(name, "missing")
        if here != there:
            raise ConfigError(
                f"resume={path}: does not fit the model: {name} is {there} in the checkpoint, {here} in the model. "
                "Choose the model and data it was made with, another name, or resume=never"
            )
    return state
