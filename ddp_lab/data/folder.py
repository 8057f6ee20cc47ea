"""`data=folder`: the images of a directory with a folder for each class."""

import hashlib
import json
import os
import re
import shutil
import socket
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from ddp_lab.config.errors import NodeError
from ddp_lab.data.record import Cached, Files, build_record
from ddp_lab.data.samples import Dataset
from ddp_lab.data.space import check_space, estimate_bytes, remove_abandoned
from ddp_lab.data.streamed import Streamed
from ddp_lab.data.transforms import ImageOptions
from ddp_lab.data.tree import Names, find_images
from ddp_lab.world.process import is_alive

VERSION = 1  # of what a record contains
SHARED_MEMORY = Path("/dev/shm")
RECORD_IN_MEMORY = re.compile(r"[0-9a-f]{16}-(\d+)")  # its key, and the process that wrote it


class Folder:
    """The images of DIR/train and, if there are such folders, of DIR/val and DIR/test.

    All files are decoded once before the first training, to find corrupt ones. What was found is kept in a record in the cache
    directory, so every launch, on any number of ranks, leaves out the same files.

    Args:
        images: how images are transformed.
        root: directory that contains train and, if there are such images, val and test, each with a folder for each class.
        on_corrupt: what to do about files that cannot be decoded: name them and stop before training (stop), or leave them out
            (skip).
        cache: where the decoded, resized images are kept, once for each machine: nowhere (none), in shared memory until the
            launch ends (ram), or in cache_dir, also for later launches (disk).
        cache_dir: directory of the cache; null is root/.cache or, if root is not writable, ~/.cache/ddp_lab.
    """

    def __init__(
        self,
        images: ImageOptions,
        root: str,
        on_corrupt: Literal["stop", "skip"],
        cache: Literal["none", "ram", "disk"],
        cache_dir: str | None,
    ):
        self.root, self.images = Path(root), images
        self.on_corrupt, self.cache = on_corrupt, cache
        default = self.root / ".cache" if os.access(self.root, os.W_OK) else Path.home() / ".cache" / "ddp_lab"
        self.cache_dir = Path(cache_dir) if cache_dir else default

    def prepare(self) -> str:
        """Write the record of the images if there is none, and return its path.

        Raises:
            NodeError: the directory does not have the expected form, a file is corrupt and on_corrupt is stop, or the record
                cannot be written.
        """
        if not self.root.is_dir():
            raise NodeError(
                f"data.root={self.root}: there is no such directory on {socket.gethostname()}; it must have train/CLASS/FILE"
            )
        names = find_images(self.root)
        folder, temporary = self._places(self._key(names))
        where = "data.cache=ram" if self.cache == "ram" else f"data.cache_dir={self.cache_dir}"
        remove_abandoned(folder.parent)
        if self.cache != "none" and not folder.exists():
            needed = estimate_bytes(self.root, names, self.images.channels, self.images.short_side)
            check_space(folder, needed, where)
        try:
            build_record(
                folder, temporary, self.root, names, self.images.channels, self.images.short_side, keep=self.cache != "none"
            )
        except OSError as error:
            raise NodeError(
                f"{where}: cannot write {folder} on {socket.gethostname()} ({error.strerror or error}). Free some "
                "space, or use another data.cache_dir or data.cache"
            ) from None
        corrupt: dict[str, str] = json.loads((folder / "corrupt.json").read_text())
        if corrupt and self.on_corrupt == "stop":
            self._release(folder)
            raise NodeError(
                f"data.root={self.root}: {len(corrupt)} of {len(names)} files cannot be decoded: {listed(corrupt)}. Remove "
                "them, or use data.on_corrupt=skip"
            )
        return str(folder)

    def load(self, record: str) -> Dataset:
        """Read the record that `prepare` returned."""
        folder, images = Path(record), self.images
        names = Names((folder / "names").read_bytes())
        corrupt: dict[str, str] = json.loads((folder / "corrupt.json").read_text())
        parts = [names[number].split("/", 2) for number in range(len(names))]
        classes = sorted({name for _, name, _ in parts})
        number_of = {name: number for number, name in enumerate(classes)}
        targets = torch.tensor([number_of[name] for _, name, _ in parts])
        numbers: dict[str, list[int]] = {split: [] for split, _, _ in parts}
        for number, (split, _, _) in enumerate(parts):
            if names[number] not in corrupt:
                numbers[split].append(number)
        if empty := [split for split, found in numbers.items() if not found]:
            raise NodeError(f"data.root={self.root}: no image in {empty[0]} can be decoded; remove the folder, or add images")
        if self.cache == "none":
            pictures = Files(self.root, names, targets, images.channels, images.short_side)
        else:
            pictures = Cached(folder, targets, images.channels)
        sets = {name: Streamed(pictures, found, images, augment=name == "train") for name, found in numbers.items()}
        training = sets["train"]
        return Dataset(
            training,
            sets.get("test"),
            classes,
            sets.get("val"),
            lambda index: names[int(training.numbers[index])].removeprefix("train/"),
            "",
            hashlib.sha256(names.block + json.dumps(sorted(corrupt)).encode()).hexdigest(),
            corrupt,
            partial(self._release, folder),
        )

    def _key(self, names: list[str]) -> str:
        """Return a hash of the names, sizes and times of all files and of what is computed from them."""
        key = hashlib.sha256(f"{VERSION} {self.cache != 'none' and (self.images.channels, self.images.short_side)}".encode())
        for name in names:
            try:
                status = os.stat(self.root / name)
                key.update(os.fsencode(f"{name}\0{status.st_size} {status.st_mtime_ns}\0"))
            except OSError:  # a link to nothing, which is reported when it is decoded
                key.update(os.fsencode(f"{name}\0missing\0"))
        return key.hexdigest()[:16]

    def _places(self, key: str) -> tuple[Path, Path]:
        """Return the path of the record and of the folder in which it is built."""
        if self.cache != "ram":
            return self.cache_dir / key, self.cache_dir / f"building-{key}"
        if not SHARED_MEMORY.is_dir():
            raise NodeError(f"data.cache=ram: {socket.gethostname()} has no {SHARED_MEMORY}; use data.cache=disk")
        parent = SHARED_MEMORY / f"ddp_lab-{os.getuid()}"
        parent.mkdir(mode=0o700, exist_ok=True)
        if parent.stat().st_uid != os.getuid():
            raise NodeError(f"data.cache=ram: {parent} belongs to another user; use data.cache=disk")
        for left in parent.iterdir():
            record = RECORD_IN_MEMORY.fullmatch(left.name)
            if record and not is_alive(int(record[1])):  # its launch was killed before all ranks had opened it
                shutil.rmtree(left, ignore_errors=True)
        return parent / f"{key}-{os.getpid()}", parent / f"building-{key}"

    def _release(self, folder: Path) -> None:
        """Remove a record in shared memory: its memory is freed when the last process that maps it exits, however it exits."""
        if self.cache == "ram":
            shutil.rmtree(folder, ignore_errors=True)


def listed(reasons: dict[str, str], most: int = 5) -> str:
    """Return the first of some reasons, and how many more there are."""
    more = len(reasons) - most
    return "; ".join(list(reasons.values())[:most]) + (f"; and {more} more" if more > 0 else "")
