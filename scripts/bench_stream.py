"""The rate at which a stream is read, compared with the same samples of a map-style dataset.

    python scripts/bench_stream.py --processes 0 1 2 --rounds 5

Both loaders read JPEG images of 256 x 320 pixels, decode, crop and stack them, in as many worker
processes, and nothing is trained, so that no training overlaps it. The loaders alternate, and
each round reads as many batches with both. The ratio is that of the medians. With 0 processes the
rank reads itself, and rates are per second of its CPU time, which other programs change little.
"""

import argparse
import io
import time
from collections.abc import Iterator
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from ddp_lab.data.batch import LoaderOptions
from ddp_lab.data.images import ImageOptions
from ddp_lab.data.loader import Loader
from ddp_lab.data.sources import Reading, samples_of
from ddp_lab.data.stream import Stream
from ddp_lab.data.stream_loader import StreamLoader
from ddp_lab.data.workers import WorkerLoader

FILES = 64  # different images
SAMPLES = 100_000  # of an epoch of the map-style dataset, and of a pass
BATCH = 64
IMAGES = ImageOptions(channels=3, image_size=224, crop_scale=[0.25, 1.0])


class Images:
    """A map-style dataset of JPEG images in memory, of (image of Pillow, class)."""

    def __init__(self):
        noise = np.random.default_rng(0)
        self.files: list[bytes] = []
        for _ in range(FILES):
            pixels = noise.integers(0, 256, (8, 10, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).resize((320, 256), Image.Resampling.BICUBIC).save(file, "JPEG")
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.open(io.BytesIO(self.files[index % FILES])), index % 10


class ImageStream(IterableDataset[Any]):
    """The same images as a stream that knows where it is."""

    def __init__(self, images: Images, part: int = 0, parts: int = 1):
        self.images = images
        self.part = part
        self.parts = parts
        self.done = 0

    def shard(self, num: int, index: int) -> "ImageStream":
        return ImageStream(self.images, self.part + index * self.parts, self.parts * num)

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.part + self.done * self.parts, SAMPLES, self.parts):
            self.done += 1
            yield self.images[index]
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def rate(loader: Loader, batches: int) -> float:
    """Return samples per second, after the processes have started."""
    clock = time.perf_counter if loader.options.num_workers else time.process_time
    loader.set_epoch(1)
    read = iter(loader)
    for _ in islice(read, 4):
        pass
    start = clock()
    for _ in islice(read, batches):
        pass
    return batches * BATCH / (clock() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=20)
    arguments = parser.parse_args()
    images = Images()
    for processes in arguments.processes:
        rates: dict[str, list[float]] = {"map-style": [], "stream": []}
        for _ in range(arguments.rounds):
            for kind, measured in rates.items():
                loader = make(kind, images, processes)
                measured.append(rate(loader, arguments.batches))
                loader.close()
        middle = {kind: median(measured) for kind, measured in rates.items()}
        ratio = middle["stream"] / middle["map-style"]
        best = max(rates["stream"]) / max(rates["map-style"])
        print(
            f"{processes} processes: map-style {middle['map-style']:,.0f}, stream "
            f"{middle['stream']:,.0f} samples/s, ratio {ratio:.3f}; of the fastest rounds "
            f"{best:.3f}",
            flush=True,
        )


def make(kind: str, images: Images, processes: int) -> Loader:
    """Return one of the two loaders."""
    options = LoaderOptions(
        BATCH, 0, 1, torch.device("cpu"), [0.5], [0.2], shuffle=True, num_workers=processes
    )
    reading = Reading("images", 0, IMAGES)
    if kind == "map-style":
        return WorkerLoader(samples_of(images, reading, augment=True), options)
    return StreamLoader(Stream(lambda: ImageStream(images), reading, max(1, processes)), options)


if __name__ == "__main__":
    main()
