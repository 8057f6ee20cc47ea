"""What is known of the images of a directory, written once for each machine: their names, which of them cannot be decoded, and
with data.cache their resized pixels.

A record is a folder that is built under a lock and renamed at the end. So a record is always complete, two launches build it
once, and what a killed build has left behind is removed by the next one.
"""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm

from ddp_lab.data.images import ImageError, ImageOptions, decode, resize
from ddp_lab.data.workers import ignore_signals

PER_WORKER = 64  # images that are worth starting a process


class Pictures:
    """The images of a directory by number, resized: decoded from their files or, from a record that has them, their pixels.

    Args:
        root: the directory.
        names: their names, bytes [N]. Worker processes share an array, unlike a list.
        images: how they are transformed.
        record: the record that has their pixels; None: none.
    """

    def __init__(self, root: Path, names: np.ndarray, images: ImageOptions, record: Path | None = None):
        self.root, self.names, self.images, self.record = root, names, images, record
        if record:
            self.places, self.pixels = np.load(record / "places.npy"), np.memmap(record / "pixels.bin", np.uint8, "r")

    def __reduce__(self) -> tuple[type["Pictures"], tuple[Any, ...]]:
        return Pictures, (self.root, self.names, self.images, self.record)  # without it, the map would be sent with its content

    def __getitem__(self, number: int) -> torch.Tensor:
        """Return an image, uint8 [channels, height, width]."""
        channels = self.images.channels
        if self.record is None:
            return resize(decode(self.root / os.fsdecode(self.names[number]), channels), self.images.short_side)
        offset, height, width = map(int, self.places[number])
        pixels = self.pixels[offset : offset + height * width * channels].reshape(height, width, channels)
        return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)


class Examined(TorchDataset[torch.Tensor | str]):
    """The pixels of images, uint8 [height, width, channels], or why one cannot be decoded; "" if the pixels are not kept."""

    def __init__(self, pictures: Pictures, keep: bool):
        self.pictures, self.keep = pictures, keep

    def __getitem__(self, number: int) -> torch.Tensor | str:
        try:
            image = self.pictures[number]
        except ImageError as error:
            return str(error)
        return image.permute(1, 2, 0).contiguous() if self.keep else ""


def build_record(folder: Path, pictures: Pictures, keep: bool) -> Path:
    """Write the record of some images to `folder`, with their pixels if `keep`, unless it exists, and return it.

    Raises:
        OSError: the record cannot be written. Nothing is left then.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it if this process dies
        building = folder.parent / "building"
        shutil.rmtree(building, ignore_errors=True)
        try:
            if not folder.exists():
                building.mkdir()
                write_record(building, pictures, keep)
                building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder


def write_record(folder: Path, pictures: Pictures, keep: bool) -> None:
    """Examine all images with all CPU cores, and write their names, pixels and what is corrupt."""
    size = len(pictures.names)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    loader = DataLoader(
        Examined(pictures, keep),
        batch_size=None,
        sampler=range(size),
        num_workers=min(cores, size // PER_WORKER),
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),
    )
    needed = keep * size * pictures.images.channels * pictures.images.short_side**2  # no image is smaller than a square
    free = shutil.disk_usage(folder).free
    if needed > free:  # before hours of work
        raise OSError(f"the resized images need at least {needed / 2**20:,.1f} MiB, but {free / 2**20:,.1f} MiB are free")
    places = np.zeros((size, 3), np.int64)  # where the pixels of an image begin, its height and its width
    reasons: dict[str, str] = {}
    with (folder / "pixels.bin").open("wb") as file:
        for number, found in enumerate(tqdm(loader, "examining images, once", delay=2, disable=None)):
            if isinstance(found, torch.Tensor):
                places[number] = file.tell(), *found.shape[:2]
                file.write(found.numpy().data)
            elif found:
                reasons[os.fsdecode(pictures.names[number])] = found
    np.save(folder / "places.npy", places)
    np.save(folder / "names.npy", pictures.names)
    (folder / "corrupt.json").write_text(json.dumps(reasons))
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file)
