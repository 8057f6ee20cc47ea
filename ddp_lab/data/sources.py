"""Where a dataset comes from: a class with `load`, or with data=own any map-style dataset."""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ddp_lab.config.errors import ConfigError, count, describe_error
from ddp_lab.data.collated import Collated
from ddp_lab.data.dataset import Dataset, Indexed, InMemory, Samples
from ddp_lab.data.images import ImageOptions
from ddp_lab.data.parts import PAIR, TargetKey, as_tree, divide
from ddp_lab.data.trees import Tree, leaves


class Source(Protocol):
    """Where a dataset comes from."""

    def load(self) -> Dataset:
        """Return the dataset.

        The first rank of each machine is the first that calls it, and may download files.
        """
        ...


@dataclass(frozen=True)
class Reading:
    """How the samples of a map-style dataset are read.

    Attributes:
        name: begins messages.
        seed: of the run, which determines what the dataset draws at random.
        images: how Pillow's images are transformed; None: they are refused.
        classes: number of classes; 0: targets are not classes.
        targets: place of the target in a sample, as in `parts.divide`.
        collate_fn: returns the batch of a list of samples; None: samples of equal shapes are
            stacked.
        key: name of the argument that is `targets`, for messages.
    """

    name: str
    seed: int
    images: ImageOptions | None = None
    classes: int = 0
    targets: TargetKey = PAIR
    collate_fn: Callable[[list[Any]], Any] | None = None
    key: str = "targets"


@dataclass(frozen=True)
class Own:
    """A map-style dataset or a stream, an IterableDataset, of the user, of (input, target).

    If its constructor has a parameter `split`, or `train` (true, false), that chooses a set; else
    it is the training set.

    Args:
        make: constructs a set, with this parameter as a keyword.
        target: name of its class or function.
        parameters: names of the parameters of that.
        splits: value of the parameter `split` for each set of samples; None: there is no such set.
        images: how Pillow's images are transformed.
        num_classes: number of classes; None: that of the attribute `classes`, if there is one.
        seed: of the run.
        targets: place of the target in a sample, as in `parts.divide`.
        collate_fn: returns the batch of a list of samples; None: samples of equal shapes are
            stacked.
        readers: number of parts of a stream that are read in turn.
    """

    make: Callable[..., Any]
    target: str
    parameters: Collection[str]
    splits: Mapping[str, str | None]
    images: ImageOptions
    num_classes: int | None
    seed: int
    targets: TargetKey = PAIR
    collate_fn: Callable[[list[Any]], Any] | None = None
    readers: int = 1

    @property
    def name(self) -> str:
        """The key and value that chose it, which begin messages."""
        return f"data.dataset._target_={self.target}"

    def load(self) -> Dataset:
        """Construct the training, validation and test set, and check the first sample of each."""
        loaded = self.sets()
        if self.num_classes:
            parts = range(self.num_classes)
        else:
            parts = getattr(loaded["train"], "classes", ())
        classes = [str(name) for name in parts] if isinstance(parts, Sequence) else []
        reading = Reading(
            name=self.name,
            seed=self.seed,
            images=self.images,
            classes=len(classes),
            targets=self.targets,
            collate_fn=self.collate_fn,
            key="data.targets",
        )
        sets = {
            name: self._samples(name, dataset, reading, augment=name == "train")
            for name, dataset in loaded.items()
        }
        # to hash all samples would read them
        facts = repr((classes, {name: parts.size for name, parts in sets.items()}))
        training = sets["train"]
        if training.is_endless:
            from ddp_lab.data.stream import fingerprint

            facts += fingerprint(training.first)
        digest = hashlib.sha256(facts.encode()).hexdigest()
        return Dataset(training, sets.get("test"), classes, sets.get("val"), digest=digest)

    def _samples(self, name: str, dataset: Any, reading: Reading, augment: bool) -> Samples:
        """Return the samples of a set, which is a map-style dataset or a stream.

        Args:
            name: train, val or test.
            dataset: the set.
            reading: how it is read.
            augment: whether images get the random transforms of training.

        Raises:
            ConfigError: as `samples_of`, or a stream cannot be used as this set.
        """
        is_stream = isinstance(dataset, IterableDataset)
        if name != "train" and is_stream:
            from ddp_lab.data.stream import read_all

            return samples_of(read_all(dataset, reading, name), reading)
        if is_stream:
            from ddp_lab.data.stream import Stream

            stream = Stream(partial(self.construct_set, name), reading, self.readers)
            stream.check(dataset)
            return stream
        if name == "train" and self.readers > 1:
            raise ConfigError(
                f"data.readers={self.readers}: is for a stream, an IterableDataset, but "
                f"{self.target} is a map-style dataset, whose samples data.num_workers processes "
                "read by their numbers. Leave data.readers out"
            )
        return samples_of(dataset, reading, augment)

    def construct_set(self, name: str) -> Any:
        """Construct a set once more: train, val or test."""
        if "split" in self.parameters:
            return self._construct("split", self.splits[name] or "")
        if "train" in self.parameters:
            return self._construct("train", name == "train")
        return self._construct()

    def sets(self) -> dict[str, Any]:
        """Construct the training, validation and test set: map-style datasets by name."""
        if "split" in self.parameters:
            return {
                name: self._construct("split", split)
                for name, split in self.splits.items()
                if split is not None
            }
        if "train" in self.parameters:
            return {
                "train": self._construct("train", True),
                "test": self._construct("train", False),
            }
        return {"train": self._construct()}

    def _construct(self, key: str = "", value: str | bool = "") -> Any:
        """Return a set: that of the value of a parameter, or the only one."""
        try:
            return self.make(**({key: value} if key else {}))
        except ConfigError:
            raise
        except Exception as error:
            names = [
                name for name, split in self.splits.items() if split == value and name != "train"
            ]
            hint = ""
            if names:
                hint = f". data.{names[0]}_split is the name of this split; null: there is none"
            setting = f" with {key}={value}" if key else ""
            raise ConfigError(
                f"{self.name}: cannot be constructed{setting}: {describe_error(error)}{hint}"
            ) from None


def samples_of(dataset: Any, reading: Reading, augment: bool = False) -> Samples:
    """Return the samples of a map-style dataset, and check the first one.

    Args:
        dataset: has `__len__` and `__getitem__`; a torch TensorDataset is used without a copy.
        reading: how it is read.
        augment: whether images get the random transforms of training.

    Raises:
        ConfigError: it is not map-style, is empty, or its first sample does not consist of inputs
            and a target.
    """
    name = reading.name
    seed = reading.seed
    images = reading.images
    classes = reading.classes
    require_map_style(dataset, name)

    if reading.collate_fn is not None:
        if images and images.augments:
            raise ConfigError(
                f"{name}: data.crop_scale, data.randaugment and data.erasing change single images "
                "of Pillow, and not the batches of data.collate_fn. Use null, null and 0, and "
                "augment in the dataset"
            )
        collated = Collated(
            dataset=dataset,
            collate_fn=reading.collate_fn,
            targets=reading.targets,
            numbers=torch.arange(len(dataset)),
            seed=seed,
            name=name,
            key=reading.key,
        )
        _ = collated.first
        return collated

    if isinstance(dataset, TensorDataset):
        inputs, targets = divide(dataset.tensors, reading.targets, f"{name}: sample 0", reading.key)
        require_no_transforms(inputs, name, images)
        if (
            classes
            and isinstance(targets, torch.Tensor)
            and targets.dim() == 1
            and not targets.is_floating_point()
        ):
            wrong = ((targets < 0) | (targets >= classes)).nonzero().flatten().tolist()
            require_class(
                targets[wrong[0]] if wrong else targets[0], name, wrong[0] if wrong else 0, classes
            )
        return InMemory(inputs, targets)

    samples = Indexed(
        partial(read, dataset, reading), torch.arange(len(dataset)), seed, images, augment
    )
    _ = samples.first
    return samples


def require_map_style(dataset: Any, name: str) -> None:
    """Check that a dataset returns samples by their numbers.

    Args:
        dataset: of the user.
        name: of the argument or the key that it is the value of, which begins the message.

    Raises:
        ConfigError: it does not, or it is empty.
    """
    hint = ""
    if isinstance(dataset, DataLoader):
        hint = (
            ", got a DataLoader. Pass its dataset, loader.dataset: batches, their order and the "
            "part of each rank are made of it here, with batch_size and, if it is needed, "
            "collate_fn"
        )
    elif isinstance(dataset, IterableDataset):
        hint = (
            f", got the IterableDataset {type(dataset).__name__}. A stream has no samples by "
            "number, in which each of them could be counted once. Read it into a list, or write a "
            "class with __getitem__; only a training set may be a stream"
        )
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and len(dataset):
        return
    raise ConfigError(
        f"{name}: must be a map-style dataset, with __len__, __getitem__ and at least one "
        f"sample{hint}"
    )


def read(dataset: Any, reading: Reading, number: int) -> tuple[Tree | Image.Image, Tree]:
    """Return a sample of a map-style dataset. The arguments are as in `samples_of`.

    Raises:
        ConfigError: it cannot be read, or as `parts_of`.
    """
    try:
        item = dataset[number]
    except MemoryError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{reading.name}: sample {number} cannot be read: {describe_error(error)}"
        ) from None
    return parts_of(item, reading, number)


def parts_of(item: Any, reading: Reading, number: int) -> tuple[Tree | Image.Image, Tree]:
    """Return the inputs and the target of what a dataset returns as a sample.

    Args:
        item: of the dataset.
        reading: how it is read.
        number: of the sample, for messages.

    Raises:
        ConfigError: it does not consist of inputs and a target that are tensors or numbers, or its
            target is no class.
    """
    name = reading.name
    images = reading.images
    classes = reading.classes
    inputs, target = divide(item, reading.targets, f"{name}: sample {number}", reading.key)
    try:
        if not (images and isinstance(inputs, Image.Image)):
            inputs = as_tree(inputs, f"{name}: sample {number}: inputs")
            require_no_transforms(inputs, name, images)
        target = as_tree(target, f"{name}: sample {number}: targets")
    except (TypeError, ValueError, RuntimeError) as error:
        kinds = " and ".join(
            type(each).__name__ for each in (item.values() if isinstance(item, Mapping) else item)
        )
        also = ", or an image of Pillow as the input" if images else ""
        raise ConfigError(
            f"{name}: sample {number} must be tensors, arrays or numbers{also}, got {kinds} "
            f"({error})"
        ) from None

    is_tensor = isinstance(target, torch.Tensor)
    if isinstance(inputs, Image.Image) and not is_tensor:
        raise ConfigError(
            f"{name}: the targets of sample {number} are {type(target).__name__}, but would not be "
            "changed with its image of Pillow. Return the image as a tensor"
        )

    if isinstance(inputs, Image.Image) and is_tensor and target.dim() > 1:
        raise ConfigError(
            f"{name}: the target of sample {number} is {list(target.shape)}, but would not be "
            "resized with its image of Pillow. Return both as tensors of one size"
        )

    if (
        classes
        and isinstance(target, torch.Tensor)
        and not target.dim()
        and not target.is_floating_point()
    ):
        require_class(target, name, number, classes)
    return inputs, target


def require_class(target: torch.Tensor, name: str, number: int, classes: int) -> None:
    """Raise a ConfigError unless the target of a sample, an integer, is one of the classes.

    The arguments are as in `read`.
    """
    if not 0 <= int(target) < classes:
        raise ConfigError(
            f"{name}: the target of sample {number} is {int(target)}; with "
            f"{count(classes, 'class')} it "
            f"must be 0 to {classes - 1} (attribute classes, or data.num_classes)"
        )


def require_no_transforms(inputs: Tree, name: str, images: ImageOptions | None) -> None:
    """Raise a ConfigError if inputs that are tensors should be augmented like images of Pillow."""
    if images and images.augments:
        dtypes = ", ".join(str(tensor.dtype) for _, tensor in leaves(inputs))
        raise ConfigError(
            f"{name}: data.crop_scale, data.randaugment and data.erasing are for images of Pillow, "
            f"but its inputs are tensors of {dtypes}. Use null, null and 0, or return images of "
            "Pillow"
        )
