"""What a dataset is: a training set, what it is evaluated with, and the names of the classes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from ddp_lab.config.types import SETS


class Samples(Protocol):
    """The training set, the validation set or the test set of a dataset."""

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

    def subset(self, indices: torch.Tensor, *, augment: bool) -> "Samples":
        """Return some of the samples.

        Args:
            indices: int64 [n], their numbers.
            augment: whether they are training samples; False: they are evaluated with.
        """
        ...


class LabelledImages(NamedTuple):
    """Images and their classes, in memory.

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

    def subset(self, indices: torch.Tensor, *, augment: bool) -> "LabelledImages":
        """Return some of the samples, a copy; the loader decides whether to augment them."""
        return LabelledImages(self.images[indices], self.targets[indices])


@dataclass(frozen=True)
class Dataset:
    """Up to three sets of samples, and the names of the classes, in the order of their numbers.

    Attributes:
        train: what the weights are fitted to.
        test: what the result is measured with, and nothing is chosen by; None: there is no such set.
        val: what epochs, hyperparameters and weights are chosen by; None: there is no such set, and nothing is chosen.
        names: returns the name of a training sample, by which it can be held out; None: its number is used.
        held_out: how `hold_out` chose the validation set; empty if the dataset came with it, or has none.
        digest: hash of the list of files, which must be the same on all ranks; empty for datasets that are not lists of files.
        skipped: the files that are left out because they cannot be decoded, with the reason.
        release: called on the first rank of each machine when all ranks have loaded the dataset.
    """

    train: Samples
    test: Samples | None
    classes: list[str]
    val: Samples | None = None
    names: Callable[[int], str] | None = None
    held_out: str = ""
    digest: str = ""
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    release: Callable[[], None] = lambda: None

    @property
    def sets(self) -> dict[str, Samples]:
        """The sets that exist, by name: train, val, test, in this order."""
        return {name: found for name in SETS if (found := getattr(self, name)) is not None}

    @property
    def evaluation_sets(self) -> dict[str, Samples]:
        """The sets that the model is evaluated with, by name: val, test or both."""
        return {name: found for name, found in self.sets.items() if name != "train"}

    def describe_sets(self) -> str:
        """Return the sizes of the sets, and how the validation set was chosen."""
        held_out = f" held out by {self.held_out}" if self.held_out else ""
        parts = {"train": "training on {:,} samples", "val": f"validating on {{:,}}{held_out}", "test": "testing on {:,}"}
        return ", ".join(parts[name].format(found.size) for name, found in self.sets.items())

    def model_shape(self) -> dict[str, int]:
        """Return the arguments of a model function that follow from the data: channels, image size and number of classes."""
        channels, _, image_size = self.train.shape
        return {"in_channels": channels, "image_size": image_size, "num_classes": len(self.classes)}
