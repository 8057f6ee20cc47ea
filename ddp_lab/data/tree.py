"""The files of a directory of images: DIR/train/CLASS/FILE, and the same below DIR/val and DIR/test."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ddp_lab.config.errors import NodeError
from ddp_lab.config.types import SETS

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
# Folders beside train that would be silently unused, though their names, in any case, say what they are.
MEANT = {"val": ("val", "valid", "validation", "dev", "eval", "evaluation"), "test": ("test", "testing")}


def find_images(root: Path) -> list[str]:
    """Return the names SPLIT/CLASS/FILE of all images below `root`, in the order of their code points.

    SPLIT is train and, if there are such folders, val and test. FILE may be in subfolders. Files and folders whose names
    begin with a dot are ignored (macOS writes `._` files beside images), and so are files that are not named like an image.

    Raises:
        NodeError: the directories do not have this form, the folders have different classes, a class of the training set has no
            image, two classes are links to the same directory, or a folder is meant to be val or test, but called otherwise.
    """
    if not (root / "train").is_dir():
        raise NodeError(
            f"data.root={root}: has no folder train; expected {root}/train/CLASS/FILE, and {root}/val and {root}/test if there "
            "are such images"
        )
    for entry in sorted(entry.name for entry in root.iterdir() if entry.is_dir()):
        if entry not in SETS and (meant := [name for name, others in MEANT.items() if entry.lower() in others]):
            raise NodeError(
                f"data.root={root}: the folder {entry} would not be used; it must be called {meant[0]}. Rename it to "
                f"{meant[0]}, or move it to another directory"
            )
    found = {name: find_set(root, name) for name in SETS if (root / name).is_dir()}
    if empty := [name for name, classes in found.items() if not any(classes.values())]:
        raise NodeError(f"data.root={root}: no image in {empty[0]}; remove the folder, or add {', '.join(SUFFIXES)} files")
    if empty := [name for name, files in found["train"].items() if not files]:
        raise NodeError(
            f"data.root={root}: no image in train/{empty[0]} ({len(empty)} of {len(found['train'])} classes have none); "
            f"expected {', '.join(SUFFIXES)} files. Remove the folder, or add images"
        )
    for name in found:
        if different := sorted(found["train"].keys() ^ found[name].keys()):
            where = "train" if different[0] in found["train"] else name
            raise NodeError(
                f"data.root={root}: train and {name} must have the same classes, but {different[0]} is in {where} only "
                f"({len(different)} such classes)"
            )
    return sorted(name for classes in found.values() for files in classes.values() for name in files)


def find_set(root: Path, split: str) -> dict[str, list[str]]:
    """Return the names of the images of train, val or test, by class."""
    classes = [entry for entry in os.scandir(root / split) if entry.is_dir() and not entry.name.startswith(".")]
    if not classes:
        raise NodeError(
            f"data.root={root}: {split} has no folders; expected a folder for each class, {root}/{split}/CLASS/FILE"
        )
    real: dict[str, str] = {}
    for entry in sorted(classes, key=lambda entry: entry.name):
        first = real.setdefault(os.path.realpath(entry.path), entry.name)
        if first != entry.name:
            raise NodeError(f"data.root={root}: the classes {first} and {entry.name} of {split} are the same directory")
    return {entry.name: list(find_files(entry.path, f"{split}/{entry.name}", set())) for entry in classes}


def find_files(folder: str, name: str, seen: set[str]) -> Iterator[str]:
    """Yield the names of the images in a folder and its subfolders; no directory twice, although links may form a loop."""
    if (real := os.path.realpath(folder)) in seen:
        return
    seen.add(real)
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        if is_folder(entry):
            yield from find_files(entry.path, f"{name}/{entry.name}", seen)
        elif entry.name.lower().endswith(SUFFIXES):
            yield f"{name}/{entry.name}"


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory or a link to one; links that form a loop are not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


class Names:
    """Many names in one block of bytes: a list of strings would be copied in each worker process that reads it.

    Args:
        block: the names, each followed by a zero byte.
    """

    def __init__(self, block: bytes):
        self.block = block
        self.ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 0)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        return os.fsdecode(self.block[self.ends[number - 1] + 1 if number else 0 : self.ends[number]])

    @staticmethod
    def pack(names: Iterable[str]) -> bytes:
        """Return the block of some names."""
        return b"".join(os.fsencode(name) + b"\0" for name in names)
