"""Checkpoints of one file and their SHA-256: written atomically, verified, and loaded without executing code from the file."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ddp_lab.config.errors import ConfigError

BEST = "best.pt"  # name of the best checkpoint
EXPECTED = "a file step_*.pt or best.pt from a run's directory checkpoints"


def digest_of(path: Path) -> Path:
    """Return the path of the file that holds the SHA-256 of `path`."""
    return path.with_name(path.name + ".sha256")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, state: dict[str, Any], temporary: Path | None = None) -> None:
    """Write a checkpoint and its SHA-256, each to a temporary file that is synced to the disk and then renamed.

    A file under its final name is therefore complete. It counts as a checkpoint only once its SHA-256 file exists, too.

    Args:
        path: the final name.
        state: the content, for torch.save.
        temporary: the file to write and then rename; None: one in the directory of `path`.

    Raises:
        OSError, RuntimeError: the file cannot be written. The temporary files are removed.
    """
    temporary = temporary or path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path, sha256(temporary))
    finally:
        if temporary.is_file():
            temporary.unlink()


def link_atomically(source: Path, path: Path) -> None:
    """Give a checkpoint and its SHA-256 a second name, in its own directory. An earlier file of that name is replaced.

    Both names share the file, which is never written in place, so this takes no space until the first name is removed.

    Raises:
        OSError: the file cannot be linked, and it cannot be copied.
    """
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(source, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, temporary)
        publish(temporary, path, digest_of(source).read_text().split()[0])
    finally:
        temporary.unlink(missing_ok=True)  # renaming does nothing if `path` already is the same file


def publish(temporary: Path, path: Path, digest: str) -> None:
    """Rename a complete file, with a file of its SHA-256, and sync the directory.

    Args:
        temporary: the file, synced to the disk.
        path: the final name.
        digest: SHA-256 of the file.
    """
    beside = path.with_suffix(".sha256.tmp")
    try:
        with beside.open("w") as file:
            file.write(f"{digest}  {path.name}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        os.replace(beside, digest_of(path))
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write the names in a directory to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def damage(path: Path) -> str | None:
    """Return why a file does not match its SHA-256; None if it matches."""
    try:
        expected = digest_of(path).read_text().split()[0]
    except (OSError, IndexError, ValueError):
        return f"{digest_of(path).name} is missing or damaged"
    try:
        return None if sha256(path) == expected else f"its SHA-256 differs from that in {digest_of(path).name}"
    except OSError as error:
        return str(error)


def load_checkpoint(path: str, shapes: dict[str, tuple[int, ...]], key: str = "resume=") -> dict[str, Any]:
    """Load a checkpoint into host memory. Only tensors and plain values are read, so a malicious file cannot execute code.

    Args:
        path: the file, as in resume=PATH.
        shapes: the shape of each tensor of the full model, by name.
        key: what the user sets to the path, for messages.

    Returns:
        The keys "progress", "seed", "model", "optimizer" and "scheduler"; "ema" if the run averages its weights.

    Raises:
        ConfigError: the file is damaged, is not a checkpoint of ddp_lab, or is of another model (the message names the first
            tensor that differs).
    """
    if digest_of(Path(path)).exists() and (problem := damage(Path(path))):
        raise ConfigError(f"{key}{path}: the file is damaged: {problem}. Use another checkpoint")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        missing = {"progress", "seed", "model", "optimizer", "scheduler"} - state.keys()
    except Exception as error:  # the bytes of a file that was not written by torch.save may mean anything to the unpickler
        reason = f"{type(error).__name__} {error}".split("\n")[0]
        raise ConfigError(f"{key}{path}: cannot be read as a checkpoint ({reason}). Use {EXPECTED}") from None
    if missing:
        raise ConfigError(f"{key}{path}: is not a checkpoint of ddp_lab: it lacks {', '.join(sorted(missing))}. Use {EXPECTED}")
    for weights in (state["model"], state.get("ema")):
        if weights:
            saved = {name: tuple(tensor.shape) for name, tensor in weights.items()}
            check_shapes(f"{key}{path}", saved, shapes, resumes=key == "resume=")
    return state


def check_shapes(about: str, saved: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]], resumes: bool) -> None:
    """Check that the tensors in a checkpoint are those of a model.

    Args:
        about: the beginning of the message: the key and the path.
        saved, shapes: the shape of each tensor in the checkpoint and in the complete model, by name.
        resumes: whether a run is to resume, which the message takes into account.

    Raises:
        ConfigError: a tensor differs; the message names the first one.
    """
    for name in [*shapes, *saved]:
        here, there = shapes.get(name, "missing"), saved.get(name, "missing")
        if here != there:
            raise ConfigError(
                f"{about}: does not match the model: {name} is {there} in the checkpoint, {here} in the model. "
                f"Use the model and data that it was trained with{', another name, or resume=never' * resumes}"
            )
