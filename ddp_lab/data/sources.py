"""The dataset that the config describes: a class with `prepare` and `load`, or any map-style dataset of the user's."""

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from hydra.utils import get_object

from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError
from ddp_lab.data.own import Own
from ddp_lab.data.samples import Dataset
from ddp_lab.data.transforms import ImageOptions


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
