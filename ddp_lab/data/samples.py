"""What a dataset is: two splits of samples, and the names of their classes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch


class Samples(Protocol):
    """One split of a dataset."""

    @property
    def size(self) -> int:
        """Number of samples."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of a sample."""
        ...

    def sample(self, epoch: int, index: int) -> tuple[torch.Tensor, int]:
        """Return an image, uint8 [channels, height, width], and its class. All randomness is a function of the arguments."""
        ...


class LabelledImages(NamedTuple):
    """The images of one split and their classes, in memory.

    Attributes:
        images: uint8 [N, channels, height, width].
        targets: int64 [N].
    """

    images: torch.Tensor
    targets: torch.Tensor

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.targets)

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of a sample."""
        return tuple(self.images.shape[1:])

    def sample(self, epoch: int, index: int) -> tuple[torch.Tensor, int]:
        """Return an image and its class, the same in every epoch: the device augments images that are in memory."""
        return self.images[index], int(self.targets[index])


@dataclass(frozen=True)
class Dataset:
    """A training split, a test split and the names of the classes, in the order of their numbers.

    Attributes:
        digest: hash of the list of files, which must be the same on all ranks; empty for datasets that are not lists of files.
        skipped: the files that are left out because they cannot be decoded, with the reason.
        release: called on the first rank of each machine when all ranks have loaded the dataset.
    """

    train: Samples
    test: Samples
    classes: list[str]
    digest: str = ""
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    release: Callable[[], None] = lambda: None

    def model_shape(self) -> dict[str, int]:
        """Return the arguments of a model function that follow from the data: channels, image size and number of classes."""
        channels, _, image_size = self.train.shape
        return {"in_channels": channels, "image_size": image_size, "num_classes": len(self.classes)}
