"""The dataset that the config describes: a class with `prepare` and `load`, or with data=own any map-style dataset."""

import inspect
import random
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from hydra.utils import get_object
from PIL import Image

from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.data.dataset import Dataset, InMemory, hold_out
from ddp_lab.data.images import ImageOptions, Streamed, resize, to_tensor


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
    if "val_split" not in data:
        raise ConfigError(
            f"data.dataset._target_={node['_target_']}: must have the methods prepare and load; a map-style dataset of (image, "
            "label) needs data=own, one of other samples data=tensors"
        )
    splits = {"train": "train", "val": data["val_split"], "test": data["test_split"]}
    if images is None:
        from ddp_lab.data.tensors import Tensors

        return Tensors(node, data["num_classes"], splits, seed)
    return Own(node, images, data["num_classes"], splits)


def dataset_sizes(data: Mapping[str, Any]) -> Dataset | None:
    """Return a dataset of which only the sizes are known: it is on the meta device, and needs neither a download nor memory.

    Args:
        data: the config group `data`.

    Returns:
        None if the dataset must be read to know its sizes: its source has no attributes sizes, shape and num_classes.
    """
    source: Any = make_source(data, seed=0)
    if not hasattr(source, "sizes"):
        return None
    with torch.device("meta"):
        images = [torch.empty(size, *source.shape, dtype=torch.uint8) for size in source.sizes]
        train, test = (InMemory(found, torch.empty(len(found), dtype=torch.int64)) for found in images)
    classes = [str(label) for label in range(source.num_classes)]
    return hold_out(Dataset(train, test, classes), data["val_fraction"], data["val_seed"])


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


class OwnSets:
    """The sets of a map-style dataset whose constructor has a parameter `split` or `train` (true, false).

    Args:
        node: the config group `data.dataset`.
        splits: value of the parameter `split` for each set of samples; None: there is no such set.
    """

    def __init__(self, node: dict[str, Any], splits: dict[str, str | None]):
        self.node, self.splits = node, splits
        self.name = f"data.dataset._target_={node['_target_']}"

    def prepare(self) -> None:
        """Construct all sets once on this machine, because constructors may download files."""
        self.sets()

    def sets(self) -> dict[str, Any]:
        """Construct the training set, the validation set and the test set: map-style datasets by name."""
        accepted = inspect.signature(get_object(self.node["_target_"])).parameters
        if "split" in accepted:
            return {name: self._construct("split", split) for name, split in self.splits.items() if split is not None}
        if "train" in accepted:
            return {"train": self._construct("train", True), "test": self._construct("train", False)}
        raise ConfigError(
            f"{self.name}: must have a parameter split, which is train, data.val_split={self.splits['val']} or "
            f"data.test_split={self.splits['test']}, or a parameter train, which is true or false (the test set)"
        )

    def _construct(self, key: str, value: str | bool) -> Any:
        """Return a set, which is a map-style dataset."""
        try:
            made = build(self.node, **{key: value})
        except ConfigError:
            raise
        except Exception as error:
            names = [name for name, split in self.splits.items() if split == value and name != "train"]
            hint = f". data.{names[0]}_split is the name of this split; null: there is none" if names else ""
            raise ConfigError(f"{self.name}: cannot be constructed with {key}={value}: {describe_error(error)}{hint}") from None
        if not (hasattr(made, "__len__") and hasattr(made, "__getitem__") and len(made)):
            raise ConfigError(f"{self.name}: must be a map-style dataset, with __len__, __getitem__ and at least one sample")
        return made


class Own(OwnSets):
    """A map-style dataset of (image, label).

    Args:
        node, splits: as in `OwnSets`.
        images: how images are transformed.
        num_classes: number of classes; None: that of the attribute `classes`.
    """

    def __init__(self, node: dict[str, Any], images: ImageOptions, num_classes: int | None, splits: dict[str, str | None]):
        super().__init__(node, splits)
        self.images, self.num_classes = images, num_classes

    def load(self, prepared: str = "") -> Dataset:
        """Construct the training set, the validation set and the test set, and check the first sample of each."""
        made = self.sets()
        classes: Any = range(self.num_classes) if self.num_classes else getattr(made["train"], "classes", None)
        if not isinstance(classes, Iterable):
            raise ConfigError(f"{self.name}: has no attribute classes, a list of names; set data.num_classes")
        classes = [str(name) for name in classes]
        sets: dict[str, Streamed] = {}
        for name, dataset in made.items():
            read = partial(self.read, dataset, len(classes))
            read(0)
            sets[name] = Streamed(read, torch.arange(len(dataset)), self.images, augment=name == "train")
        return Dataset(sets["train"], sets.get("test"), classes, sets.get("val"))

    def read(self, dataset: Any, classes: int, number: int) -> tuple[torch.Tensor, int]:
        """Return a sample of a dataset whose labels are below `classes`: its image, uint8, resized, and its class."""
        # The dataset may draw from these generators. torch's is seeded for this sample already (images.py).
        key = int(torch.randint(2**32, ()))
        np.random.seed(key)
        random.seed(key)
        try:
            item = dataset[number]
        except MemoryError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.name}: sample {number} cannot be read: {describe_error(error)}") from None
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise ConfigError(f"{self.name}: sample {number} must be (image, label), got {type(item).__name__}")
        image = as_image(item[0], self.images.channels, f"{self.name}: the image of sample {number}")
        return resize(image, self.images.short_side), as_label(item[1], classes, f"{self.name}: the label of sample {number}")


def as_image(image: Any, channels: int, what: str) -> torch.Tensor:
    """Return an image of a user's dataset as uint8 [channels, height, width]. `what` begins the message of a ConfigError."""
    if isinstance(image, Image.Image):
        return to_tensor(image, channels)
    if not isinstance(image, torch.Tensor):
        raise ConfigError(f"{what} must be a PIL image or a tensor, got {type(image).__name__}")
    image = image.unsqueeze(0) if image.dim() == 2 else image
    if image.dim() != 3 or len(image) not in (1, channels):
        raise ConfigError(f"{what} must be [{channels}, height, width] (data.channels={channels}), got {list(image.shape)}")
    if image.is_floating_point() and 0 <= image.min() <= image.max() <= 1:
        image = (image * 255).round().to(torch.uint8)
    if image.dtype != torch.uint8:
        got = f"{image.dtype} from {image.min():.3g} to {image.max():.3g}"
        raise ConfigError(f"{what} must be uint8 or a float in [0, 1], which data.mean and data.std normalise, got {got}")
    return image.expand(channels, -1, -1)


def as_label(label: Any, classes: int, what: str) -> int:
    """Return a label of a user's dataset as an integer below `classes`. `what` begins the message of a ConfigError."""
    try:
        value = int(label)
    except (TypeError, ValueError):
        raise ConfigError(f"{what} must be an integer, got {label!r}") from None
    if not 0 <= value < classes:
        allowed = f"with {classes} classes it must be 0 to {classes - 1} (attribute classes, or data.num_classes)"
        raise ConfigError(f"{what} is {value}; {allowed}")
    return value
