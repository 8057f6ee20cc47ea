"""`data=folder`: the images of a directory with a folder for each class."""

import hashlib
import json
import os
import socket
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ddp_lab.config.errors import NodeError
from ddp_lab.config.types import SETS
from ddp_lab.data.cache import Pictures, build_record
from ddp_lab.data.dataset import Dataset
from ddp_lab.data.images import SUFFIXES, ImageOptions, Streamed, find_files

VERSION = 2  # of what a record contains
# Folders beside train that would be silently unused, though their names, in any case, say what they are.
MEANT = {"val": ("val", "valid", "validation", "dev", "eval", "evaluation"), "test": ("test", "testing")}


class Folder:
    """The images of DIR/train and, if there are such folders, of DIR/val and DIR/test.

    All files are decoded once before the first training, to find corrupt ones. What was found is kept in a record in the cache
    directory, so every launch, on any number of ranks, leaves out the same files.

    Args:
        images: how images are transformed.
        root: directory that contains train and, if there are such images, val and test, each with a folder for each class.
        on_corrupt: what to do about files that cannot be decoded: name them and stop before training (stop), or leave them out
            (skip).
        cache: where the decoded, resized images are kept, once for each machine: nowhere (none), or in cache_dir, also for
            later launches (disk).
        cache_dir: directory of the cache; null is root/.cache or, if root is not writable, ~/.cache/ddp_lab.
    """

    def __init__(
        self,
        images: ImageOptions,
        root: str,
        on_corrupt: Literal["stop", "skip"],
        cache: Literal["none", "disk"],
        cache_dir: str | None,
    ):
        self.root, self.images = Path(root), images
        self.on_corrupt, self.cached = on_corrupt, cache == "disk"
        default = self.root / ".cache" if os.access(self.root, os.W_OK) else Path.home() / ".cache" / "ddp_lab"
        self.cache_dir = Path(cache_dir) if cache_dir else default

    def prepare(self) -> str:
        """Write the record of the images if there is none, and return its path.

        Raises:
            NodeError: the directory does not have the expected form, a file is corrupt and on_corrupt is stop, or the record
                cannot be written.
        """
        names = find_images(self.root)
        pictures = Pictures(self.root, np.array([os.fsencode(name) for name in names]), self.images)
        try:
            record = build_record(self.cache_dir / self._key(names), pictures, self.cached)
        except OSError as error:
            raise NodeError(
                f"data.cache_dir={self.cache_dir}: cannot write the record of the images on {socket.gethostname()} "
                f"({error.strerror or error}). Free some space, or use a smaller data.resize, another data.cache_dir or "
                "data.cache=none"
            ) from None
        corrupt = corrupt_files(record)
        if corrupt and self.on_corrupt == "stop":
            raise NodeError(
                f"data.root={self.root}: {len(corrupt)} of {len(names)} files cannot be decoded: {listed(corrupt)}. Remove "
                "them, or use data.on_corrupt=skip"
            )
        return str(record)

    def load(self, prepared: str) -> Dataset:
        """Read the record that `prepare` returned."""
        record, images = Path(prepared), self.images
        packed, corrupt = np.load(record / "names.npy"), corrupt_files(record)
        names = [os.fsdecode(name) for name in packed]
        parts = [name.split("/", 2) for name in names]
        classes = sorted({name for _, name, _ in parts})
        number_of = {name: number for number, name in enumerate(classes)}
        targets = torch.tensor([number_of[name] for _, name, _ in parts])
        read = partial(read_labelled, Pictures(self.root, packed, images, record if self.cached else None), targets)
        sets: dict[str, Streamed] = {}
        for split in dict.fromkeys(split for split, _, _ in parts):
            found = [number for number, name in enumerate(names) if parts[number][0] == split and name not in corrupt]
            if not found:
                raise NodeError(f"data.root={self.root}: no image in {split} can be decoded; remove the folder, or add images")
            sets[split] = Streamed(read, torch.tensor(found), images, augment=split == "train")
        train = sets["train"].numbers.tolist()
        listing = b"\0".join([*packed.tolist(), json.dumps(sorted(corrupt)).encode()])
        return Dataset(
            sets["train"],
            sets.get("test"),
            classes,
            sets.get("val"),
            names=lambda index: names[train[index]].removeprefix("train/"),
            digest=hashlib.sha256(listing).hexdigest(),
            skipped=corrupt,
        )

    def _key(self, names: list[str]) -> str:
        """Return a hash of the names, sizes and times of all files and of what is computed from them."""
        key = hashlib.sha256(f"{VERSION} {self.cached and (self.images.channels, self.images.short_side)}".encode())
        for name in names:
            try:
                status = os.stat(self.root / name)
                key.update(os.fsencode(f"{name}\0{status.st_size} {status.st_mtime_ns}\0"))
            except OSError:  # a link to nothing, which is reported when it is decoded
                key.update(os.fsencode(f"{name}\0missing\0"))
        return key.hexdigest()[:16]


def read_labelled(pictures: Pictures, targets: torch.Tensor, number: int) -> tuple[torch.Tensor, int]:
    """Return an image by its number, and its class."""
    return pictures[number], int(targets[number])


def corrupt_files(record: Path) -> dict[str, str]:
    """Return the files that cannot be decoded, with the reason."""
    return json.loads((record / "corrupt.json").read_text())


def listed(reasons: dict[str, str], most: int = 5) -> str:
    """Return the first of some reasons, and how many more there are."""
    more = len(reasons) - most
    return "; ".join(list(reasons.values())[:most]) + (f"; and {more} more" if more > 0 else "")


def find_images(root: Path) -> list[str]:
    """Return the names SPLIT/CLASS/FILE of all images below `root`, in the order of their code points.

    SPLIT is train and, if there are such folders, val and test. FILE may be in subfolders (`find_files`).

    Raises:
        NodeError: the directories do not have this form, the folders have different classes, a class of the training set has no
            image, or a folder is meant to be val or test, but called otherwise.
    """
    key, form = f"data.root={root}", f"expected {root}/train/CLASS/FILE, and val and test alike if there are such images"
    if not (root / "train").is_dir():
        raise NodeError(f"{key}: has no folder train on {socket.gethostname()}; {form}")
    for entry in sorted(entry.name for entry in root.iterdir() if entry.is_dir() and entry.name not in SETS):
        if meant := [name for name, others in MEANT.items() if entry.lower() in others]:
            raise NodeError(f"{key}: the folder {entry} would not be used. Rename it to {meant[0]}, or move it elsewhere")
    found = {split: find_classes(root, split) for split in SETS if (root / split).is_dir()}
    empty = [f"train/{name}" for name, files in found["train"].items() if not files]
    empty += [split for split, classes in found.items() if not any(classes.values())]
    if empty:
        kinds = f"{', '.join(SUFFIXES)} files"
        raise NodeError(f"{key}: no image in {empty[0]}; {form}. Remove the folder, or add {kinds} ({len(empty)} are empty)")
    for split, classes in found.items():
        if different := sorted(found["train"].keys() ^ classes.keys()):
            where = "train" if different[0] in found["train"] else split
            raise NodeError(
                f"{key}: train and {split} must have the same classes, but {different[0]} is in {where} only "
                f"({len(different)} such classes)"
            )
    return sorted(name for classes in found.values() for files in classes.values() for name in files)


def find_classes(root: Path, split: str) -> dict[str, list[str]]:
    """Return the names of the images of train, val or test, by class."""
    classes = (entry.name for entry in os.scandir(root / split) if entry.is_dir() and not entry.name.startswith("."))
    return {name: list(find_files(str(root / split / name), f"{split}/{name}", set())) for name in sorted(classes)}
