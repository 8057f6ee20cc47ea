"""The dataset that the config describes: a class with `prepare` and `load`, or with data=own any map-style dataset."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from hydra.utils import get_object
from PIL import Image

from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.data.dataset import Dataset, hold_out
from ddp_lab.data.datasets import Digits, Synthetic, Torchvision
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


def dataset_sizes(data: Mapping[str, Any]) -> Dataset | None:
    """Return a dataset on the meta device, of which only the sizes are known; None if it must be read to know them.

    Args:
        data: the config group `data`, as plain values.
    """
    target = get_object(data["dataset"]["_target_"])
    if target not in (Digits, Synthetic, Torchvision):
        return None
    source: Digits | Synthetic | Torchvision = build(data["dataset"])
    return hold_out(source.sizes(), data["val_fraction"], data["val_seed"])


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
    """Check that all ranks have the same list of files.

    Args:
        digests: `Dataset.digest` of each rank.

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
        """Construct the training set, the validation set and the test set, and check their first sample."""
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
        sets: dict[str, Streamed] = {}
        for name, given in made.items():
            pictures = OwnPictures(self.name, given, self.images, len(classes))
            sets[name] = Streamed(pictures.read, torch.arange(pictures.check()), self.images, augment=name == "train")
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

    def _classes(self, split: Any) -> list[str]:
        if self.num_classes is not None:
            return [str(label) for label in range(self.num_classes)]
        if getattr(split, "classes", None) is None:
            raise ConfigError(f"{self.name}: has no attribute classes (the names); set data.num_classes")
        return read(f"{self.name}: the names in the attribute classes", lambda: [str(name) for name in split.classes])


def read(what: str, values: Callable[[], T]) -> T:
    """Return `values()`, which calls the user's code.

    Raises:
        ConfigError: it fails; the message begins with `what`.
    """
    try:
        return values()
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(f"{what} cannot be read: {describe_error(error)}") from None


class OwnPictures:
    """The images of a map-style dataset as uint8 tensors, resized.

    Args:
        name: the dataset, for messages.
        dataset: the user's.
        images: how images are transformed.
        num_classes: labels must be smaller.
    """

    def __init__(self, name: str, dataset: Any, images: ImageOptions, num_classes: int):
        self.name, self.dataset, self.images, self.num_classes = name, dataset, images, num_classes

    def check(self) -> int:
        """Check the first sample and, where the dataset has them in an attribute `targets`, all labels.

        Returns:
            The number of samples.
        """
        for method in ("__len__", "__getitem__"):
            if not hasattr(self.dataset, method):
                raise ConfigError(f"{self.name}: has no {method}; it must be a map-style dataset, with __len__ and __getitem__")
        size = read(f"{self.name}: the number of samples (__len__)", lambda: len(self.dataset))
        if size == 0:
            raise ConfigError(f"{self.name}: has no samples; it must have at least one")
        self.read(0)
        labels = read(f"{self.name}: the labels in the attribute targets", lambda: getattr(self.dataset, "targets", None))
        for number, label in enumerate([] if labels is None else labels):
            self._label(number, label)
        return size

    def read(self, number: int) -> tuple[torch.Tensor, int]:
        """Return an image, whose shorter side is resized, and its class."""
        item = read(f"{self.name}: sample {number}", lambda: self.dataset[number])
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise ConfigError(f"{self.name}: sample {number} must be (image, label), got {type(item).__name__}")
        image, label = item
        return resize(self._image(number, image), self.images.short_side), self._label(number, label)

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

    def _label(self, number: int, label: Any) -> int:
        try:
            value = int(label)
        except (TypeError, ValueError):
            raise ConfigError(f"{self.name}: the label of sample {number} must be an integer, got {label!r}") from None
        if not 0 <= value < self.num_classes:
            raise ConfigError(
                f"{self.name}: the label of sample {number} is {value}; with {self.num_classes} classes it must be 0 to "
                f"{self.num_classes - 1} (attribute classes, or data.num_classes)"
            )
        return value
