"""`data=folder`: the images of a directory with a folder for each class."""

import hashlib
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.config.types import SETS, Seed
from ddp_lab.data.dataset import Dataset, Indexed
from ddp_lab.data.images import SUFFIXES, ImageError, ImageOptions, decode, find_files

# Folders beside train that would be silently unused, though their names, in any case, say what they
# are.
MEANT = {
    "val": ("val", "valid", "validation", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}


class Folder:
    """The images of DIR/train and, if there are such folders, of DIR/val and DIR/test.

    Args:
        images: how images are transformed.
        root: directory that contains train and, if there are such images, val and test, each with a
            folder for each class.
        seed: of the run.
    """

    def __init__(self, images: ImageOptions, root: str, seed: Seed):
        self.root = Path(root)
        self.images = images
        self.seed = seed

    def load(self) -> Dataset:
        """Return the sets. The files are decoded when they are needed.

        Raises:
            NodeError: the directory does not have the expected form.
        """
        names = find_images(self.root)
        parts = [name.split("/", 2) for name in names]
        classes = sorted({name for _, name, _ in parts})
        number_of = {name: number for number, name in enumerate(classes)}
        targets = torch.tensor([number_of[name] for _, name, _ in parts])

        # worker processes share an array, unlike a list
        packed = np.array([os.fsencode(name) for name in names])
        read = partial(read_labelled, self.root, packed, targets)

        splits = {split: [i for i, part in enumerate(parts) if part[0] == split] for split in SETS}
        sets = {
            split: Indexed(
                read, torch.tensor(numbers), self.seed, self.images, augment=split == "train"
            )
            for split, numbers in splits.items()
            if numbers
        }

        return Dataset(
            sets["train"],
            sets.get("test"),
            classes,
            sets.get("val"),
            digest=hashlib.sha256(b"\0".join(packed.tolist())).hexdigest(),
            find_corrupt=partial(find_corrupt, self.root, names),
        )


def read_labelled(
    root: Path, names: np.ndarray, targets: torch.Tensor, number: int
) -> tuple[Image.Image, torch.Tensor]:
    """Return an image by its number, and its class."""
    try:
        return decode(root / os.fsdecode(names[number])), targets[number]
    except ImageError as error:
        raise ConfigError(
            f"{error}. Remove it; `ddp-lab doctor` with the same data finds all such files"
        ) from None


def find_corrupt(root: Path, names: list[str]) -> None:
    """Decode all files.

    Raises:
        NodeError: some cannot be decoded; it names them all.
    """

    def reason(name: str) -> str:
        try:
            decode(root / name)
        except ImageError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor() as pool:  # Pillow releases the interpreter's lock
        problems = tqdm(
            pool.map(reason, names), "decoding images", len(names), delay=2, disable=None
        )
        corrupt = [text for text in problems if text]
    if corrupt:
        raise NodeError(
            f"data.root={root}: {len(corrupt)} of {len(names)} files cannot be decoded. Remove "
            f"them: {'; '.join(corrupt)}"
        )


def find_images(root: Path) -> list[str]:
    """Return the names SPLIT/CLASS/FILE of all images below `root`, in order of code points.

    SPLIT is train and, if there are such folders, val and test. FILE may be in subfolders
    (`find_files`).

    Raises:
        NodeError: the directories do not have this form, the folders have different classes, a
            class of the training set has no image, or a folder is meant to be val or test, but
            called otherwise.
    """
    key = f"data.root={root}"
    form = f"expected {root}/train/CLASS/FILE, and val and test alike if there are such images"
    if not (root / "train").is_dir():
        raise NodeError(f"{key}: has no folder train on {socket.gethostname()}; {form}")

    for entry in sorted(
        entry.name for entry in root.iterdir() if entry.is_dir() and entry.name not in SETS
    ):
        if meant := [name for name, others in MEANT.items() if entry.lower() in others]:
            raise NodeError(
                f"{key}: the folder {entry} would not be used. Rename it to {meant[0]}, or move it "
                "elsewhere"
            )

    classes_by_split = {
        split: find_classes(root, split) for split in SETS if (root / split).is_dir()
    }
    empty = [f"train/{name}" for name, files in classes_by_split["train"].items() if not files]
    empty += [split for split, classes in classes_by_split.items() if not any(classes.values())]
    if empty:
        kinds = f"{', '.join(SUFFIXES)} files"
        raise NodeError(
            f"{key}: no image in {empty[0]}; {form}. Remove the folder, or add {kinds} "
            f"({len(empty)} are empty)"
        )

    for split, classes in classes_by_split.items():
        if different := sorted(classes_by_split["train"].keys() ^ classes.keys()):
            where = "train" if different[0] in classes_by_split["train"] else split
            raise NodeError(
                f"{key}: train and {split} must have the same classes, but {different[0]} is in "
                f"{where} only ({len(different)} such classes)"
            )

    return sorted(
        name
        for classes in classes_by_split.values()
        for files in classes.values()
        for name in files
    )


def find_classes(root: Path, split: str) -> dict[str, list[str]]:
    """Return the names of the images of train, val or test, by class."""
    classes = (
        entry.name
        for entry in os.scandir(root / split)
        if entry.is_dir() and not entry.name.startswith(".")
    )
    return {
        name: list(find_files(str(root / split / name), f"{split}/{name}", set()))
        for name in sorted(classes)
    }
