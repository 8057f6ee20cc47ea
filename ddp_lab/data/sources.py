"""The dataset that the config describes: a class with `prepare` and `load`, or with data=own any map-style dataset."""

import inspect
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from hydra.utils import get_object
from PIL import Image

from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.data.dataset import Dataset
from ddp_lab.data.images import ImageOptions, Streamed, resize, to_tensor

T = TypeVar("T")


class Source(Protocol):
    """Where a dataset comes from."""

    def prepare(self) -> str | None:
        """Download or prepare files, on the first rank of each machine. A string is passed to `load` on all its ranks."""
        ...

    def load(self, prepared: str = ..., /) -> Dataset:
        """Return the dataset."""
        ...


def make_source(data: Mapping[str, Any], seed: int) -> Source:
    """Construct the source that the config group `data` describes.

    Args:
        data: the config group, as plain values.
        seed: the run's seed.

    Raises:
        ConfigError: the class is neither a source nor, under data=own, a map-style dataset.
    """
    node = data["dataset"]
    target = get_object(node["_target_"])
    images = image_options(data, seed)
    if hasattr(target, "prepare") and hasattr(target, "load"):
        # By position, because instantiate would turn a dataclass that is passed by name into a DictConfig.
        return build(node, images) if "images" in inspect.signature(target).parameters else build(node)
    if images is None:
        raise ConfigError(
            f"data.dataset._target_={node['_target_']}: must have the methods prepare and load; a map-style dataset of (image, "
            "label) needs data=own"
        )
    splits = {"train": "train", "val": data["val_split"], "test": data["test_split"]}
    return Own(node, images, data["num_classes"], splits)


def image_options(data: Mapping[str, Any], seed: int) -> ImageOptions | None:
    """Return how images are transformed according to the config group `data`; None if it holds a dataset in memory."""
    if "image_size" not in data:
        return None
    return ImageOptions(seed, **{key: data[key] for key in ImageOptions.__dataclass_fields__ if key != "seed"})


def check_same(digests: list[str]) -> None:
    """Check that all ranks have the same list of files: `digests` has the `Dataset.digest` of each.

    Raises:
        ConfigError: they differ.
    """
    if different := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise ConfigError(
            f"data.root: rank {different[0]} has other files than rank 0 ({len(different)} ranks in all); every machine must "
            "have the same images, of which the same can be decoded"
        )


class Own:
    """A map-style dataset of (image, label) whose constructor has a parameter `split` or `train` (true, false).

    Args:
        node: the config group `data.dataset`.
        images: how images are transformed.
        num_classes: number of classes; None: that of the attribute `classes`.
        splits: value of the parameter `split` for each set of samples; None: there is no such set.
    """

    def __init__(self, node: dict[str, Any], images: ImageOptions, num_classes: int | None, splits: dict[str, str | None]):
        self.node, self.images, self.num_classes, self.splits = node, images, num_classes, splits
        self.name = f"data.dataset._target_={node['_target_']}"

    def prepare(self) -> None:
        """Construct all sets once on this machine, because constructors may download files."""
        self.load()

    def load(self, prepared: str = "") -> Dataset:
        """Construct the training set, the validation set and the test set, and check what is known of their samples."""
        accepted = inspect.signature(get_object(self.node["_target_"])).parameters
        if "split" in accepted:
            made = {name: self._construct("split", split) for name, split in self.splits.items() if split is not None}
        elif "train" in accepted:
            made = {"train": self._construct("train", True), "test": self._construct("train", False)}
        else:
            raise ConfigError(
                f"{self.name}: must have a parameter split, which is train, data.val_split={self.splits['val']} or "
                f"data.test_split={self.splits['test']}, or a parameter train, which is true or false (the test set)"
            )
        classes = self._classes(made["train"])
        sets = {name: self._set(dataset, len(classes), augment=name == "train") for name, dataset in made.items()}
        return Dataset(sets["train"], sets.get("test"), classes, sets.get("val"))

    def _construct(self, key: str, value: str | bool) -> Any:
        try:
            return build(self.node, **{key: value})
        except ConfigError:
            raise
        except Exception as error:
            key_of = {split: f"data.{name}_split" for name, split in self.splits.items() if name != "train"}
            hint = f". {key_of[value]} is the name of this split; null: there is none" if value in key_of else ""
            raise ConfigError(f"{self.name}: cannot be constructed with {key}={value}: {describe_error(error)}{hint}") from None

    def _classes(self, dataset: Any) -> list[str]:
        if self.num_classes is not None:
            return [str(label) for label in range(self.num_classes)]
        if getattr(dataset, "classes", None) is None:
            raise ConfigError(f"{self.name}: has no attribute classes (the names); set data.num_classes")
        return self._ask("the names in the attribute classes", lambda: [str(name) for name in dataset.classes])

    def _set(self, dataset: Any, classes: int, augment: bool) -> Streamed:
        """Return a set; its first sample is checked and, if the dataset has them in an attribute `targets`, all its labels."""
        for method in ("__len__", "__getitem__"):
            if not hasattr(dataset, method):
                raise ConfigError(f"{self.name}: has no {method}; it must be a map-style dataset, with __len__ and __getitem__")
        size = self._ask("the number of samples (__len__)", lambda: len(dataset))
        if size == 0:
            raise ConfigError(f"{self.name}: has no samples; it must have at least one")
        self.read(dataset, classes, 0)
        labels = self._ask("the labels in the attribute targets", lambda: getattr(dataset, "targets", None))
        for number, label in enumerate([] if labels is None else labels):
            self._label(number, label, classes)
        return Streamed(partial(self.read, dataset, classes), torch.arange(size), self.images, augment)

    def _ask(self, what: str, values: Callable[[], T]) -> T:
        """Return `values()`, which calls the user's code, or raise a ConfigError that says what cannot be read."""
        try:
            return values()
        except MemoryError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.name}: {what} cannot be read: {describe_error(error)}") from None

    def read(self, dataset: Any, classes: int, number: int) -> tuple[torch.Tensor, int]:
        """Return a sample of a dataset whose labels are below `classes`: its image, uint8, resized, and its class."""
        # The dataset may draw from these generators. torch's is seeded for this sample already (images.py).
        key = int(torch.randint(2**32, ()))
        np.random.seed(key)
        random.seed(key)
        item = self._ask(f"sample {number}", lambda: dataset[number])
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise ConfigError(f"{self.name}: sample {number} must be (image, label), got {type(item).__name__}")
        image, label = item
        return resize(self._image(number, image), self.images.short_side), self._label(number, label, classes)

    def _image(self, number: int, image: Any) -> torch.Tensor:
        channels = self.images.channels
        if isinstance(image, Image.Image):
            return to_tensor(image, channels)
        what = f"{self.name}: the image of sample {number}"
        if not isinstance(image, torch.Tensor):
            raise ConfigError(f"{what} must be a PIL image or a tensor, got {type(image).__name__}")
        image = image.unsqueeze(0) if image.dim() == 2 else image
        if image.dim() != 3 or len(image) not in (1, channels):
            raise ConfigError(f"{what} must be [{channels}, height, width] (data.channels={channels}), got {list(image.shape)}")
        if image.is_floating_point():
            if image.min() < 0 or image.max() > 1:
                raise ConfigError(
                    f"{what} must be in [0, 1], got {image.min():.3g} to {image.max():.3g}; data.mean normalises it"
                )
            image = (image * 255).round().to(torch.uint8)
        if image.dtype != torch.uint8:
            raise ConfigError(f"{what} must be uint8 or a float in [0, 1], got {image.dtype}")
        return image.expand(channels, -1, -1)

    def _label(self, number: int, label: Any, classes: int) -> int:
        what = f"{self.name}: the label of sample {number}"
        try:
            value = int(label)
        except (TypeError, ValueError):
            raise ConfigError(f"{what} must be an integer, got {label!r}") from None
        if not 0 <= value < classes:
            allowed = f"with {classes} classes it must be 0 to {classes - 1} (attribute classes, or data.num_classes)"
            raise ConfigError(f"{what} is {value}; {allowed}")
        return value
