"""The sizes of a dataset without its images: those of the known datasets need neither a download nor memory."""

import math
from typing import NamedTuple

import torch
from hydra.utils import get_object
from omegaconf import DictConfig

from ddp_lab.data.datasets import Digits, Synthetic, Torchvision
from ddp_lab.data.held_out import hold_out
from ddp_lab.data.samples import Dataset

# Images to train on and to test on, and the shape of an image, of torchvision's datasets.
KNOWN = {
    "MNIST": (60000, 10000, (1, 28, 28)),
    "FashionMNIST": (60000, 10000, (1, 28, 28)),
    "CIFAR10": (50000, 10000, (3, 32, 32)),
}


class Sizes(NamedTuple):
    """Number and shape of the samples of a split, in place of the samples."""

    size: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the images, as uint8, and of the targets, as int64, in memory."""
        return self.size * (math.prod(self.shape) + 8)

    def sample(self, epoch: int, index: int) -> tuple[torch.Tensor, int]:
        raise AssertionError("only the sizes of this dataset are known")

    def subset(self, indices: torch.Tensor, *, augment: bool) -> "Sizes":
        return Sizes(len(indices), self.shape)


def sizes_of(data: DictConfig) -> Dataset | None:
    """Return a dataset of which only the sizes are known; None if it must be read to know them.

    Args:
        data: the config group `data`.
    """
    node, target = data.dataset, get_object(data.dataset["_target_"])
    if target is Torchvision:
        train, test, shape = KNOWN[node.name]
        classes = 10
    elif target is Digits:
        train, test, shape, classes = 1437, 360, (1, 28, 28), 10
    elif target is Synthetic:
        train, test, classes = node.train_size, node.test_size, node.num_classes
        shape = (node.channels, node.image_size, node.image_size)
    else:
        return None
    dataset = Dataset(Sizes(train, shape), Sizes(test, shape), [str(label) for label in range(classes)])
    return hold_out(dataset, data.val_fraction, data.val_seed)
