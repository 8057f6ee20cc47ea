"""The checkpoints in a run's directory `checkpoints`: names, hashes, writing and removal.

step_00000040.pt, step_00000040.pt.sha256   one file, and its SHA-256 as `sha256sum -c` reads it
step_00000050.sharded/                      a directory of the ranks' shards (safetensors)
    state.json, SHA256SUMS                  everything but tensors, and the SHA-256 of each file
best.pt or best.sharded                     a symbolic link to the best checkpoint

All are written and synced under temporary names, and then renamed. A kill at any time leaves valid
checkpoints only.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ddp_lab.config.errors import ConfigError

SHARDED = ".sharded"
SUMS = "SHA256SUMS"
STATE = "state.json"


def is_sharded(path: Path) -> bool:
    """Return whether a path is that of a sharded checkpoint, by its name or its files."""
    return path.suffix == SHARDED or (path / SUMS).is_file()


def step_of(path: Path) -> int:
    """Return the step in the name `step_NNNNNNNN`, which may have more than eight digits."""
    return int(path.stem.partition("_")[2])


def steps_in(folder: Path) -> list[Path]:
    """Return the checkpoints `step_NNNNNNNN`, oldest first."""
    files = [*folder.glob("step_*.pt"), *folder.glob(f"step_*{SHARDED}")]
    return sorted(files, key=lambda path: (step_of(path), path.suffix))


def best_in(folder: Path) -> Path | None:
    """Return the best checkpoint; None if there is none."""
    return next(
        (path for path in (folder / "best.pt", folder / f"best{SHARDED}") if path.exists()), None
    )


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sums_of(path: Path) -> Path:
    """Return the path of the file that holds the SHA-256 of a checkpoint's files."""
    path = path.resolve()
    return path / SUMS if is_sharded(path) else path.with_name(path.name + ".sha256")


def find_damage(path: Path, part: slice = slice(None)) -> str | None:
    """Return why the files of a checkpoint do not match their SHA-256; None if they match.

    Args:
        path: the checkpoint.
        part: which of the files are read, in order of name. The last one has everything but
            tensors.

    Raises:
        ConfigError: an earlier version wrote it, in a format that is not read any more.
    """
    path = path.resolve()
    if (path / "manifest.json").is_file():
        raise ConfigError(
            f"{path}: is a sharded checkpoint of an earlier version, whose format is not read any "
            "more. Make one file of it with that version (commit 07fce5d: `ddp-lab merge RUN "
            "--output FILE.pt`), and use that file"
        )

    sums = sums_of(path)
    folder = path if path.is_dir() else path.parent
    try:
        digests = {
            name: digest
            for digest, name in (line.split(maxsplit=1) for line in sums.read_text().splitlines())
        }
        if not path.is_dir():
            # the file may have been renamed
            digests = {path.name: next(iter(digests.values()), "")}
        else:
            files = {file.name for file in path.iterdir()} - {SUMS}
            different = sorted(digests.keys() ^ files)
            if different:
                return f"{', '.join(different)}: missing, or not listed in {SUMS}"
    except (OSError, ValueError):
        return f"{sums.name} is missing or damaged"

    for name in sorted(digests)[part]:
        try:
            if sha256(folder / name) != digests[name]:
                return f"the SHA-256 of {name} differs from that in {sums.name}"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def write_file(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint of one file and its SHA-256.

    Raises:
        OSError, RuntimeError: the file cannot be written. No temporary files remain.
    """
    temporary = path.with_suffix(".tmp")
    beside = path.with_suffix(".sha256.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        write_text(beside, f"{sha256(temporary)}  {path.name}\n")
        path.unlink(missing_ok=True)  # one of the same step would not match the new hash
        os.replace(beside, sums_of(path))
        # after a kill before this there is a hash without a file, which is no checkpoint
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        beside.unlink(missing_ok=True)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file, and sync it to the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Write the content of a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a checkpoint and its hashes.

    A directory is renamed first, so that a kill meanwhile leaves no damaged one.
    """
    if not is_sharded(path):
        path.unlink()
        sums_of(path).unlink(missing_ok=True)
        return
    removed = path.with_suffix(".removed.tmp")
    os.rename(path, removed)
    shutil.rmtree(removed, ignore_errors=True)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the `keep` newest and the best."""
    best = best_in(folder)
    for path in steps_in(folder)[:-keep]:
        if not (best and path.samefile(best)):
            remove(path)


def link_best(path: Path) -> None:
    """Let a checkpoint be the best one in place of another, by a symbolic link."""
    best = path.with_name(f"best{path.suffix}")
    temporary = path.with_name("best.tmp")
    forget_best(path.parent, but=best.name)
    temporary.symlink_to(path.name)
    os.replace(temporary, best)
    if path.suffix == ".pt":  # for a copy of the directory with files in place of links
        path.with_name("best.pt.sha256").symlink_to(sums_of(path).name)


def forget_best(folder: Path, but: str = "") -> None:
    """Remove the link to the best checkpoint, or its copy, unless it is a link named `but`."""
    delete(path for path in folder.glob("best.*") if path.name != but or not path.is_symlink())


def delete(paths: Iterable[Path]) -> None:
    """Remove files, links and directories."""
    for path in list(paths):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
