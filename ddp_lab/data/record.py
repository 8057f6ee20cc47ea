"""What is known of the images of a directory, written once for each machine: their names, which of them cannot be decoded, and
with data.cache their resized pixels.

A record is a folder that is built under a lock and renamed at the end. So a record is always complete, two launches build it
once, and what a killed build has left behind is removed by the next one, also if that builds another record.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm

from ddp_lab.data.decode import ImageError, decode, resize
from ddp_lab.data.tree import Names
from ddp_lab.data.workers import ignore_signals

PER_WORKER = 64  # images that are worth starting a process


class Pixels(NamedTuple):
    """Where the pixels of an image are: in pixels-FILE.bin at `offset`, uint8 [height, width, channels]."""

    file: int
    offset: int
    height: int
    width: int


class Examine(TorchDataset[Pixels | str]):
    """Decode images by number: where their pixels are, or why one cannot be decoded.

    Args:
        root: the directory of the images.
        names: their names.
        channels, short_side: as in `decode` and `resize`.
        folder: where each process appends the pixels to a file of its own; None: they are not kept.
    """

    def __init__(self, root: Path, names: list[str], channels: int, short_side: int, folder: Path | None):
        self.root, self.names, self.channels, self.short_side, self.folder = root, names, channels, short_side, folder

    def __getitem__(self, number: int) -> Pixels | str:
        try:
            image = decode(self.root / self.names[number], self.channels)
        except ImageError as error:
            return str(error)
        if self.folder is None:
            return Pixels(0, 0, 0, 0)
        pixels = resize(image, self.short_side).permute(1, 2, 0).contiguous().numpy()
        worker = get_worker_info()
        own = worker.id if worker else 0
        with (self.folder / f"pixels-{own}.bin").open("ab") as file:
            offset = file.tell()
            file.write(pixels.tobytes())
        return Pixels(own, offset, *pixels.shape[:2])


def build_record(
    folder: Path, temporary: Path, root: Path, names: list[str], channels: int, short_side: int, keep: bool
) -> None:
    """Examine all images and write the record, unless it exists.

    Args:
        folder: the record.
        temporary: a name in the same directory, the same in all launches that would write the same record.
        root: the directory of the images.
        names: their names.
        channels, short_side: as in `decode` and `resize`.
        keep: whether the record has the pixels.

    Raises:
        OSError: the record cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(temporary.with_suffix(".lock")):
        if folder.exists():
            return
        shutil.rmtree(temporary, ignore_errors=True)  # left behind by a build that was killed: this process has the lock
        temporary.mkdir()
        try:
            pixels, reasons = examine(Examine(root, names, channels, short_side, temporary if keep else None))
            (temporary / "names").write_bytes(Names.pack(names))
            (temporary / "corrupt.json").write_text(json.dumps(reasons))
            if keep:
                np.save(temporary / "pixels.npy", np.array(pixels, dtype=np.int64).reshape(-1, len(Pixels._fields)))
            for path in temporary.iterdir():
                with path.open("rb") as file:
                    os.fsync(file)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def examine(images: Examine) -> tuple[list[Pixels], dict[str, str]]:
    """Examine all images with all CPU cores, and return where their pixels are, and why some cannot be decoded, by name."""
    workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, len(images.names) // PER_WORKER)
    loader = DataLoader(
        images,
        batch_size=None,
        sampler=range(len(images.names)),
        num_workers=workers,
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),
    )
    pixels: list[Pixels] = []
    reasons: dict[str, str] = {}
    for name, found in zip(images.names, tqdm(loader, "examining images, once", delay=2, disable=None), strict=True):
        if isinstance(found, str):
            reasons[name] = found
        pixels.append(Pixels(-1, 0, 0, 0) if isinstance(found, str) else found)
    return pixels, reasons


@contextmanager
def locked(path: Path, wait: bool = True) -> Generator[None]:
    """Hold the lock of a file, which the kernel releases if this process dies. The file is removed at the end.

    Raises:
        BlockingIOError: `wait` is false, and another process holds the lock.
    """
    while True:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if is_at(file, path):  # not if the process that had the lock has removed the file
                try:
                    yield
                finally:
                    path.unlink()
                return


def is_at(file: IO[str], path: Path) -> bool:
    """Return whether an open file still has this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


class Files:
    """Images that are decoded when they are read.

    Args:
        root: the directory of the images.
        names: their names.
        targets: int64 [N], their classes.
        channels, short_side: as in `decode` and `resize`.
    """

    def __init__(self, root: Path, names: Names, targets: torch.Tensor, channels: int, short_side: int):
        self.root, self.names, self.targets, self.channels, self.short_side = root, names, targets, channels, short_side

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        image = decode(self.root / self.names[number], self.channels)
        return resize(image, self.short_side), int(self.targets[number])


class Cached:
    """Images whose resized pixels are in a record, which all processes of a machine map into memory.

    Args:
        folder: the record.
        targets: int64 [N], their classes.
        channels: 3 or 1.
    """

    def __init__(self, folder: Path, targets: torch.Tensor, channels: int):
        self.folder, self.targets, self.channels = folder, targets, channels
        self.places = np.load(folder / "pixels.npy", allow_pickle=False)
        self.maps = {int(path.stem[7:]): np.memmap(path, np.uint8, "r") for path in folder.glob("pixels-*.bin")}

    def __reduce__(self) -> tuple[type["Cached"], tuple[Path, torch.Tensor, int]]:
        return Cached, (self.folder, self.targets, self.channels)  # without it, a map would be sent with its content

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        file, offset, height, width = map(int, self.places[number])
        pixels = self.maps[file][offset : offset + height * width * self.channels].reshape(height, width, self.channels)
        return torch.from_numpy(np.array(pixels)).permute(2, 0, 1), int(self.targets[number])
