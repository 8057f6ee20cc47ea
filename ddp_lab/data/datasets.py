"""The datasets of one uint8 tensor per set: images, or the bytes of a text.

Such a tensor fits on every device.
"""

import os
import socket
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from ddp_lab.config.errors import ConfigError, NodeError, count
from ddp_lab.config.types import Count
from ddp_lab.data.dataset import Dataset, InMemory
from ddp_lab.world.process import default_timeout

BYTES = 256  # the size of the vocabulary of a text


class Digits:
    """The 1,797 handwritten digits of scikit-learn, enlarged to 28x28: 1,437 train, 360 test.

    They have 8x8 pixels of 0 to 16.
    """

    sizes = (1437, 360)
    shape = (1, 28, 28)
    num_classes = 10

    def load(self) -> Dataset:
        """Read the digits from scikit-learn's file."""
        # load_digits() returns the same numbers, but importing it loads scipy and most of
        # scikit-learn: 800 modules, 1 s.
        package = find_spec("sklearn")
        assert package is not None, "scikit-learn is a dependency of ddp_lab"
        assert package.origin is not None, "scikit-learn is a regular package"
        path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        # [1797, 65]: 64 pixels, then the digit
        table = torch.from_numpy(np.loadtxt(path, delimiter=","))
        images = table[:, :-1].reshape(-1, 1, 8, 8).float() / 16
        images = F.interpolate(images, size=28, mode="bilinear", align_corners=False)
        images = (images * 255).round().to(torch.uint8)
        targets = table[:, -1].long()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        train, test = (InMemory(images[part], targets[part]) for part in order.split(self.sizes))
        return Dataset(train, test, [str(digit) for digit in range(10)])


class Synthetic:
    """A made-up dataset of any shape.

    Each class has a random picture, and each sample is half that picture, half noise.

    Args:
        train_size: number of training images.
        test_size: number of test images.
        channels: number of channels of an image.
        image_size: height and width of an image, in pixels.
        num_classes: number of classes.
    """

    def __init__(
        self,
        train_size: Count,
        test_size: Count,
        channels: Count,
        image_size: Count,
        num_classes: Count,
    ):
        self.sizes = train_size, test_size
        self.shape = channels, image_size, image_size
        self.num_classes = num_classes

    def load(self) -> Dataset:
        """Generate the images, which are the same in every process."""
        generator = torch.Generator().manual_seed(0)

        def noise(n: int) -> torch.Tensor:
            return torch.randint(0, 128, (n, *self.shape), dtype=torch.uint8, generator=generator)

        pictures = noise(self.num_classes)

        def draw(size: int) -> InMemory:
            targets = torch.randint(0, self.num_classes, (size,), generator=generator)
            return InMemory(noise(size) + pictures[targets], targets)

        train, test = (draw(size) for size in self.sizes)
        return Dataset(train, test, [str(label) for label in range(self.num_classes)])


class Torchvision:
    """MNIST, FashionMNIST or CIFAR10 from torchvision.

    Args:
        name: name of the dataset in torchvision.
        root: directory of the dataset, which is downloaded to it if it is missing.
    """

    files = {
        "MNIST": "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte",
        "FashionMNIST": "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte",
        "CIFAR10": "cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}",
    }
    sizes = (60000, 10000)
    shape = (1, 28, 28)
    num_classes = 10

    def __init__(self, name: Literal["MNIST", "FashionMNIST", "CIFAR10"], root: str):
        self.name = name
        self.root = Path(root)
        if name == "CIFAR10":
            self.sizes = (50000, 10000)
            self.shape = (3, 32, 32)

    def _open(self, train: bool, root: Path | None = None, download: bool = False) -> Any:
        import torchvision  # takes 1.5 s, so only these datasets import it

        return getattr(torchvision.datasets, self.name)(
            root or self.root, train=train, download=download
        )

    def load(self) -> Dataset:
        """Read both splits, which are downloaded first if files are missing.

        Raises:
            NodeError: the files are missing and cannot be downloaded.
        """
        try:
            return self._read()
        except (RuntimeError, OSError, ValueError, AssertionError):  # missing or incomplete
            self._download()
        return self._read()

    def _download(self) -> None:
        """Download to a temporary directory in `root`, and rename the files.

        An incomplete download is never used.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.root, prefix=".download-") as folder:
                # torchvision sets none: an unresponsive server would stall all ranks
                with default_timeout(60):
                    self._open(True, root=Path(folder), download=True)
                for path in Path(folder).rglob("*"):
                    if path.is_file():
                        target = self.root / path.relative_to(folder)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        os.replace(path, target)
        except (RuntimeError, OSError, ValueError, AssertionError) as error:
            where = f"{self.root.resolve()}/{self.files[self.name]}"
            raise NodeError(
                f"data.root={self.root}: {self.name} is not on {socket.gethostname()} and could "
                f"not be downloaded ({' '.join(str(error).split())}). Put its files at {where}, or "
                "set data.root to the directory that contains "
                f"{self.files[self.name].split('/')[0]}/, or use data=digits, which needs no "
                "download"
            ) from None

    def _read(self) -> Dataset:
        train = self._open(True)
        test = self._open(False)

        def convert(dataset: Any) -> InMemory:
            images = torch.as_tensor(dataset.data)
            if images.dim() == 4:
                images = images.permute(0, 3, 1, 2).contiguous()
            else:
                images = images.unsqueeze(1)
            return InMemory(images, torch.as_tensor(dataset.targets, dtype=torch.int64))

        return Dataset(convert(train), convert(test), list(train.classes))


class Text:
    """The bytes of a file.

    Sample i has the tokens i * context to (i + 1) * context, and as targets those that follow each.

    Args:
        root: the file.
        context: tokens of a sample.
    """

    def __init__(self, root: str, context: Count):
        self.root = Path(root)
        self.context = context

    def load(self) -> Dataset:
        """Read the file.

        Raises:
            NodeError: it cannot be read.
            ConfigError: it is too short.
        """
        try:
            tokens = torch.from_numpy(np.fromfile(self.root, np.uint8))
        except OSError as error:
            raise NodeError(
                f"data.root={self.root}: cannot be read on {socket.gethostname()} "
                f"({error.strerror}). Use the path of a file"
            ) from None
        inputs, targets = cut(tokens, self.context, str(self.root))
        return Dataset(InMemory(inputs, targets), None, [str(byte) for byte in range(BYTES)])


def cut(tokens: torch.Tensor, context: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples of bytes, and the bytes that follow each: both uint8 [samples, context].

    Raises:
        ConfigError: there are too few bytes for two samples. The message calls them `name`.
    """
    number = (len(tokens) - 1) // context
    if number < 2:
        raise ConfigError(
            f"data.context={context}: {name} has {count(len(tokens), 'byte')}, and two samples or "
            "more "
            f"need {2 * context + 1:,}. Use a smaller context or more text"
        )
    end = number * context
    return tokens[:end].view(number, context), tokens[1 : end + 1].view(number, context)
