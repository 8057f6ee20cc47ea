"""Image datasets as two uint8 tensors each. Small enough to live on every device, so nothing here streams."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ddp_lab.config.errors import NodeError
from ddp_lab.config.types import Count


class LabelledImages(NamedTuple):
    """images: uint8 [N, channels, height, width]; targets: int64 [N]."""

    images: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True)
class Dataset:
    train: LabelledImages
    test: LabelledImages
    classes: list[str]

    def model_shape(self) -> dict[str, int]:
        """What a model has to know of the data, by the names of the model's parameters."""
        _, channels, _, image_size = self.train.images.shape
        return {"in_channels": channels, "image_size": image_size, "num_classes": len(self.classes)}


class Digits:
    """The 1,797 handwritten digits inside scikit-learn (8x8, 16 greys), enlarged to 28x28; 1,437 train, 360 test."""

    def prepare(self) -> None:
        """Nothing to fetch."""

    def load(self) -> Dataset:
        # load_digits() returns the same numbers, but importing it loads scipy and most of scikit-learn: 800 modules, 1 s.
        path = Path(find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"
        table = torch.from_numpy(np.loadtxt(path, delimiter=","))  # [1797, 65]: 64 pixels, then the digit
        images = table[:, :-1].reshape(-1, 1, 8, 8).float() / 16
        images = F.interpolate(images, size=28, mode="bilinear", align_corners=False)
        images = (images * 255).round().to(torch.uint8)
        targets = table[:, -1].long()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        train, test = order[:1437], order[1437:]
        return Dataset(
            LabelledImages(images[train], targets[train]),
            LabelledImages(images[test], targets[test]),
            [str(digit) for digit in range(10)],
        )


class Synthetic:
    """A made-up dataset of any shape: each class has a random picture, each sample is half that picture, half noise.

    Args:
        train_size: number of training images.
        test_size: number of test images.
        channels: number of channels of an image.
        image_size: height and width of an image, in pixels.
        num_classes: number of classes.
    """

    def __init__(self, train_size: Count, test_size: Count, channels: Count, image_size: Count, num_classes: Count):
        self.sizes = train_size, test_size
        self.shape = channels, image_size, image_size
        self.num_classes = num_classes

    def prepare(self) -> None:
        """Nothing to fetch."""

    def load(self) -> Dataset:
        generator = torch.Generator().manual_seed(0)

        def noise(n: int) -> torch.Tensor:
            return torch.randint(0, 128, (n, *self.shape), dtype=torch.uint8, generator=generator)

        pictures = noise(self.num_classes)

        def draw(size: int) -> LabelledImages:
            targets = torch.randint(0, self.num_classes, (size,), generator=generator)
            return LabelledImages(noise(size) + pictures[targets], targets)

        train, test = (draw(size) for size in self.sizes)
        return Dataset(train, test, [str(label) for label in range(self.num_classes)])


@contextmanager
def default_timeout(seconds: float) -> Iterator[None]:
    """Give every new socket a timeout, unless it has one."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


class Torchvision:
    """MNIST, FashionMNIST or CIFAR10, by torchvision, downloaded by `prepare` where it is missing.

    Args:
        name: name of the dataset in torchvision.
        root: directory that holds the dataset or that it is downloaded to.
    """

    files = {
        "MNIST": "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte",
        "FashionMNIST": "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte",
        "CIFAR10": "cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}",
    }

    def __init__(self, name: Literal["MNIST", "FashionMNIST", "CIFAR10"], root: str):
        self.name = name
        self.root = Path(root)

    def _open(self, train: bool, root: Path | None = None, download: bool = False):
        import torchvision  # 1.5 s, which other datasets need not wait for

        return getattr(torchvision.datasets, self.name)(root or self.root, train=train, download=download)

    def prepare(self) -> None:
        """Downloads what is missing: into a folder beside its place, then renamed, so that a half-done one is never used.

        Raises:
            NodeError: the files are missing and cannot be downloaded.
        """
        try:
            self._open(True), self._open(False)
            return
        except (RuntimeError, OSError, ValueError, AssertionError):
            pass  # missing or incomplete
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.root, prefix=".download-") as folder:
                with default_timeout(60):  # torchvision sets none: a silent network would hang all ranks
                    self._open(True, root=Path(folder), download=True)
                for path in Path(folder).rglob("*"):
                    if path.is_file():
                        target = self.root / path.relative_to(folder)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        os.replace(path, target)
        except (RuntimeError, OSError, ValueError, AssertionError) as error:
            where = f"{self.root.resolve()}/{self.files[self.name]}"
            raise NodeError(
                f"data.root={self.root}: {self.name} is not on {socket.gethostname()} and could not be downloaded "
                f"({' '.join(str(error).split())}). Put its files at {where}, or point data.root at the folder that holds "
                f"{self.files[self.name].split('/')[0]}/, or use data=digits, which needs no download"
            ) from None

    def load(self) -> Dataset:
        train, test = self._open(True), self._open(False)

        def convert(dataset) -> LabelledImages:
            images = torch.as_tensor(dataset.data)
            images = images.permute(0, 3, 1, 2).contiguous() if images.dim() == 4 else images.unsqueeze(1)
            return LabelledImages(images, torch.as_tensor(dataset.targets, dtype=torch.int64))

        return Dataset(convert(train), convert(test), list(train.classes))
