"""Measure how many images a second one worker process loads, next to torchvision's ImageFolder and DataLoader.

python scripts/bench_decode.py --images 512 --repeats 5

All loops read the same JPEG files of 500 x 375 pixels, which are made in a temporary directory, and apply the same transforms:
the shorter side resized to 256, a random crop resized to 224, a random flip. The loops take turns, and each rate is a median.
The first batches of a pass do not count, because ddp_lab has loaded them before the pass begins.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.data.loader import LoaderOptions  # noqa: E402
from ddp_lab.data.sources import make_source  # noqa: E402
from ddp_lab.data.workers import WorkerLoader  # noqa: E402

BATCH, CLASSES = 32, 4
AHEAD = 4  # batches, more than a worker loads ahead
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def write_images(root: Path, size: int) -> None:
    """Write smooth noise as JPEG files of about 60 KB, like photographs."""
    draw = np.random.default_rng(0)
    for number in range(size + CLASSES):
        split = "train" if number < size else "val"
        folder = root / split / f"class{number % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        noise = Image.fromarray(draw.integers(0, 256, (375, 500, 3), dtype=np.uint8))
        noise.filter(ImageFilter.GaussianBlur(0.8)).save(folder / f"{number:05}.jpg", quality=88)


def with_imagefolder(root: Path, resize: bool) -> Callable[[], Iterable[Any]]:
    """Return torchvision's way: transforms on PIL images, normalisation on the device left out, as in `ours`."""
    steps = [v2.Resize(256)] * resize + [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    dataset = ImageFolder(str(root / "train"), v2.Compose(steps))
    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=1, persistent_workers=True)
    return lambda: loader


def ours(root: Path, cache: str, **changed: Any) -> Callable[[], Iterable[Any]]:
    node = {
        "_target_": "ddp_lab.data.folder.Folder",
        "root": str(root),
        "val_fraction": 0.1,
        "val_seed": 0,
        "on_corrupt": "stop",
        "cache": cache,
        "cache_dir": str(root / "cache"),
    }
    transforms = {"channels": 3, "image_size": 224, "resize": 256, "crop_scale": [0.08, 1.0], "flip": True}
    data = transforms | {"dataset": node, "randaugment": None, "erasing": 0.0, "mean": MEAN, "num_classes": None} | changed
    source = make_source(data, 0)
    dataset = source.load(source.prepare() or "")
    options = {"dp_rank": 0, "dp_size": 1, "device": torch.device("cpu"), "mean": MEAN, "std": STD, "flip": True}
    loader = WorkerLoader(dataset.train, LoaderOptions(BATCH, num_workers=1, shuffle=True, **options))
    epoch = 0

    def batches() -> Iterable[Any]:
        nonlocal epoch
        epoch += 1
        loader.set_epoch(epoch)
        return loader

    return batches


def measure(batches: Iterable[Any]) -> float:
    """Return the images per second of a pass after its first batches."""
    passing = iter(batches)
    for _ in range(AHEAD):
        next(passing)
    start = time.perf_counter()
    seen = sum(len(batch[0]) for batch in passing)
    return seen / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        write_images(root, arguments.images)
        loops = {
            "ImageFolder + DataLoader": with_imagefolder(root, resize=True),
            "the same without Resize(256)": with_imagefolder(root, resize=False),
            "ddp_lab, data.cache=none": ours(root, "none"),
            "ddp_lab, data.cache=disk": ours(root, "disk"),
            "ddp_lab, data.cache=none, data.randaugment=9": ours(root, "none", randaugment=9),
        }
        rates: dict[str, list[float]] = {name: [] for name in loops}
        for repeat in range(arguments.repeats + 1):
            for name, batches in loops.items():
                rate = measure(batches())
                if repeat:  # the first pass starts the worker
                    rates[name].append(rate)
        print(f"torch {torch.__version__}, {arguments.images} images, one worker process, median of {arguments.repeats}")
        for name, values in rates.items():
            print(f"{name:45} {statistics.median(values):8,.0f} images/s  ({min(values):,.0f} to {max(values):,.0f})")


if __name__ == "__main__":
    main()
