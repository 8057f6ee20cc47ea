"""A split whose images are read one by one, when they are needed."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ddp_lab.data.transforms import View, seeded


class Pictures(Protocol):
    """Images of any size, with their classes."""

    def __getitem__(self, number: int, /) -> tuple[torch.Tensor, int]:
        """Return an image, uint8 [channels, height, width], whose shorter side is resized already, and its class."""
        ...


class Streamed:
    """Some of the pictures, as samples of one size.

    Args:
        pictures: where the images come from.
        numbers: which of the pictures belong to the split, in order.
        view: the transform that makes a sample of a picture; it may draw from the global generators.
        seed: seed of the transforms.
        shape: channels, height and width of a sample.
    """

    def __init__(self, pictures: Pictures, numbers: Sequence[int], view: View, seed: int, shape: tuple[int, ...]):
        self.pictures, self.view, self.seed, self.shape = pictures, view, seed, shape
        self.numbers = torch.tensor(numbers, dtype=torch.int64)  # worker processes share it, unlike a list of integers

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.numbers)

    def sample(self, epoch: int, index: int) -> tuple[torch.Tensor, int]:
        """Return an image, uint8 [channels, height, width], and its class; a function of seed, epoch and index."""
        with seeded(self.seed, epoch, index):
            image, target = self.pictures[int(self.numbers[index])]
            return self.view(image), target
