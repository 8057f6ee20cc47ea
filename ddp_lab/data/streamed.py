"""Samples whose images are read one by one, when they are needed."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ddp_lab.data.transforms import ImageOptions, seeded


class Pictures(Protocol):
    """Images of any size, with their classes."""

    def __getitem__(self, number: int, /) -> tuple[torch.Tensor, int]:
        """Return an image, uint8 [channels, height, width], whose shorter side is resized already, and its class."""
        ...


class Streamed:
    """Some of the pictures, as samples of one size.

    Args:
        pictures: where the images come from.
        numbers: which of the pictures, in order.
        images: how a sample is made of a picture.
        augment: whether with the random transforms of training; they may draw from the global generators.
    """

    def __init__(self, pictures: Pictures, numbers: Sequence[int] | torch.Tensor, images: ImageOptions, *, augment: bool):
        self.pictures, self.images, self.shape = pictures, images, images.shape
        self.view = images.training_view() if augment else images.evaluation_view()
        self.numbers = torch.as_tensor(numbers, dtype=torch.int64)  # worker processes share it, unlike a list of integers

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.numbers)

    def sample(self, epoch: int, index: int) -> tuple[torch.Tensor, int]:
        """Return an image, uint8 [channels, height, width], and its class; a function of seed, epoch and index."""
        with seeded(self.images.seed, epoch, index):
            image, target = self.pictures[int(self.numbers[index])]
            return self.view(image), target

    def subset(self, indices: torch.Tensor, *, augment: bool) -> "Streamed":
        """Return some of the samples."""
        return Streamed(self.pictures, self.numbers[indices], self.images, augment=augment)
