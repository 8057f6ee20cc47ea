"""What a dataset is: a training set, what it is evaluated with, and the names of the classes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.config.types import ENDLESS, SETS
from ddp_lab.data.batch import apply
from ddp_lab.data.seeds import seeded

if TYPE_CHECKING:
    from ddp_lab.data.images import ImageOptions
    from ddp_lab.data.trees import Tree

VAL_FRACTION = 0.1  # data.val_fraction=null, if there is nothing else to evaluate with


class Samples(ABC):
    """The training set, the validation set or the test set: pairs of an input and a target.

    Each is a tensor of any shape and dtype, or a tuple or dict of tensors. A target is None where
    there is none.
    """

    first: "tuple[Tree, Tree]"  # the first sample
    readers: int = 0  # of a stream

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of samples."""

    @abstractmethod
    def sample(self, epoch: int, index: int) -> "tuple[Tree, Tree]":
        """Return an input and its target; a function of seed, epoch and index."""

    def batch(self, epoch: int, indices: Sequence[int]) -> "tuple[Tree, Tree]":
        """Return the inputs and targets of some samples, [b, ...]."""
        from ddp_lab.data.trees import stack

        return stack([self.sample(epoch, index) for index in indices])

    @abstractmethod
    def subset(self, indices: torch.Tensor, augment: bool) -> "Samples":
        """Return some samples, int64 [n], as training samples (`augment`) or to evaluate with."""

    def number(self, index: int) -> int:
        """Return the number that the user's dataset has for the sample `index`."""
        return index

    def in_memory(self) -> "InMemory | None":
        """Return all samples in host memory; None if they can only be read one by one."""
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample's input, such as channels, height and width; () if it is no tensor."""
        inputs, _ = self.first
        return tuple(inputs.shape) if isinstance(inputs, torch.Tensor) else ()

    @property
    def is_image(self) -> bool:
        """Whether the inputs are images: uint8 [channels, height, width].

        The loader augments and normalises images.
        """
        inputs, _ = self.first
        return (
            isinstance(inputs, torch.Tensor) and inputs.dtype == torch.uint8 and inputs.dim() == 3
        )

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether the samples of all batches have the same shapes."""
        return True

    @property
    def is_endless(self) -> bool:
        """Whether they are a stream, which has no end."""
        return self.size == ENDLESS

    @property
    def is_tree(self) -> bool:
        """Whether inputs or targets are no tensor."""
        return not all(isinstance(part, torch.Tensor) for part in self.first)

    def example(self, samples: int, device: str = "cpu") -> "tuple[Tree, Tree]":
        """Return inputs and targets of zeros, as the loader returns a batch.

        They have its shapes and dtypes, which are no longer uint8.

        Args:
            samples: of the batch.
            device: of it.
        """

        def zeros(tensor: torch.Tensor, of_bytes: torch.dtype) -> torch.Tensor:
            dtype = of_bytes if tensor.dtype == torch.uint8 else tensor.dtype
            return torch.zeros(samples, *tensor.shape, dtype=dtype, device=device)

        inputs, targets = self.first
        of_bytes = torch.get_default_dtype() if self.is_image else torch.int64
        return apply(lambda tensor: zeros(tensor, of_bytes), inputs), apply(
            lambda tensor: zeros(tensor, torch.int64), targets
        )

    def first_inputs(self, samples: int) -> "Tree":
        """Return the inputs of the first sample, several times, as the loader returns a batch.

        Args:
            samples: of the batch.
        """

        def repeated(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype == torch.uint8:
                dtype = torch.get_default_dtype() if self.is_image else torch.int64
                tensor = tensor.to(dtype)
            return tensor.expand(samples, *tensor.shape).clone()

        inputs, _ = self.first
        return apply(repeated, inputs)


@dataclass(frozen=True)
class InMemory(Samples):
    """Samples in memory; on the meta device if only the sizes are known. The loader augments them.

    Attributes:
        inputs: [N, ...]; images are uint8 [N, channels, height, width]. Or a tuple or dict of
            tensors.
        targets: [N, ...]; or a tuple or dict of tensors; or None.
    """

    inputs: "Tree"
    targets: "Tree"

    @property
    def size(self) -> int:
        if isinstance(self.inputs, torch.Tensor):
            return len(self.inputs)
        from ddp_lab.data.trees import size

        return size(self.inputs)

    @property
    def first(self) -> "tuple[Tree, Tree]":  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.sample(0, 0)

    def sample(self, epoch: int, index: int) -> "tuple[Tree, Tree]":
        return apply(lambda tensor: tensor[index], self.inputs), apply(
            lambda tensor: tensor[index], self.targets
        )

    def in_memory(self) -> "InMemory":
        return self

    @property
    def device(self) -> torch.device:
        """The device of the samples."""
        inputs, _ = self.first
        if isinstance(inputs, torch.Tensor):
            return inputs.device
        from ddp_lab.data.trees import leaves

        return next(tensor.device for _, tensor in leaves(inputs))

    def subset(self, indices: torch.Tensor, augment: bool) -> "InMemory":
        chosen = (
            apply(lambda tensor: tensor[indices], self.inputs),
            apply(lambda tensor: tensor[indices], self.targets),
        )
        return InMemory(*chosen)


@dataclass(frozen=True)
class Indexed(Samples):
    """Samples that are read one by one when they are needed.

    Attributes:
        read: returns an input, which is a tensor or an image of Pillow, and its target by number.
            It may draw from the global generators, which are seeded for each sample.
        numbers: int64 [N], the samples, in order. Worker processes share it, unlike a list of
            integers.
        seed: of the run.
        images: how images of Pillow become tensors, uint8 [channels, height, width]; tensors stay
            as they are.
        augment: whether images get the random transforms of training.
    """

    read: "Callable[[int], tuple[Tree | Image.Image, Tree]]"
    numbers: torch.Tensor
    seed: int
    images: "ImageOptions | None" = None
    augment: bool = False

    @property
    def size(self) -> int:
        return len(self.numbers)

    @cached_property
    def first(self) -> "tuple[Tree, Tree]":  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.sample(0, 0)

    @cached_property
    def view(self) -> Callable[[Image.Image], torch.Tensor]:
        """The transform of images to samples."""
        assert self.images is not None, "images of Pillow need options"
        return self.images.view(self.augment)

    def sample(self, epoch: int, index: int) -> "tuple[Tree, Tree]":
        with seeded("sample", seed=self.seed, epoch=epoch, index=index):
            inputs, target = self.read(self.number(index))
            return self.view(inputs) if isinstance(inputs, Image.Image) else inputs, target

    def number(self, index: int) -> int:
        return int(self.numbers[index])

    def subset(self, indices: torch.Tensor, augment: bool) -> "Indexed":
        return replace(self, numbers=self.numbers[indices], augment=augment)


@dataclass(frozen=True)
class Dataset:
    """Up to three sets of samples, and the names of the classes, in the order of their numbers.

    Attributes:
        train: what the weights are fitted to.
        test: what the result is measured with, and nothing is chosen by; None: there is no such
            set.
        val: what epochs, hyperparameters and weights are chosen by; None: there is no such set, and
            nothing is chosen.
        held_out: how `hold_out` chose the validation set; empty if the dataset came with it, or has
            none.
        digest: hash of the list of files, or of the classes and sizes of data=own, the same on all
            ranks; empty: not compared.
        files: hash of each file by its name, where a file is hashed; empty: none is.
        find_corrupt: decodes all files and raises a NodeError about those that cannot be decoded;
            None: there are no files.
    """

    train: Samples
    test: Samples | None
    classes: list[str]
    val: Samples | None = None
    held_out: str = ""
    digest: str = ""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    find_corrupt: Callable[[], None] | None = None

    @property
    def sets(self) -> dict[str, Samples]:
        """The sets that exist, by name: train, val, test, in this order."""
        return {name: samples for name in SETS if (samples := getattr(self, name)) is not None}

    @property
    def evaluation_sets(self) -> dict[str, Samples]:
        """The sets that the model is evaluated with, by name: val, test or both."""
        return {name: samples for name, samples in self.sets.items() if name != "train"}

    def describe_sets(self) -> str:
        """Return the sizes of the sets, and how the validation set was chosen."""
        held_out = f" held out by {self.held_out}" if self.held_out else ""
        size = "a stream" if self.train.is_endless else count(self.train.size, "sample")
        parts = {
            "train": f"training on {size}",
            "val": f"validating on {{:,}}{held_out}",
            "test": "testing on {:,}",
        }
        return ", ".join(parts[name].format(samples.size) for name, samples in self.sets.items())

    def model_shape(self) -> dict[str, Any]:
        """Return the arguments of a model function that follow from the data.

        They are those of images, or those of tokens.
        """
        inputs, targets = self.train.example(1, "meta")
        arguments: dict[str, Any] = {}
        if self.classes:
            arguments["num_classes"] = len(self.classes)
        if not isinstance(inputs, torch.Tensor):
            return arguments  # a model of several inputs knows their shapes itself

        shape = tuple(inputs.shape[1:])
        arguments["input_shape"] = list(shape)
        # one for each token
        is_next = isinstance(targets, torch.Tensor) and targets.shape == inputs.shape
        if self.classes and is_next and len(shape) == 1 and not inputs.is_floating_point():
            arguments |= {"vocabulary": len(self.classes), "context": shape[0]}

        if len(shape) == 3:
            return arguments | {"in_channels": shape[0], "image_size": shape[-1]}
        return arguments


def hold_out(dataset: Dataset, fraction: float | None, seed: int) -> Dataset:
    """Return the dataset with a validation set of some training samples, which are not trained on.

    The choice depends on the arguments alone.

    Args:
        dataset: with or without a validation set.
        fraction: of the training samples; 0: none; None: VAL_FRACTION if the dataset has nothing to
            evaluate with, else none.
        seed: of the choice.

    Raises:
        ConfigError: the dataset has a validation set already, or no sample is left to train on or
            to evaluate with.
    """
    evaluates = bool(dataset.evaluation_sets)
    if fraction is None:
        fraction = 0 if evaluates else VAL_FRACTION
    if not fraction and evaluates:
        return dataset

    key = f"data.val_fraction={fraction}"
    if dataset.val is not None:
        raise ConfigError(
            f"{key}: the dataset has a validation set already; use data.val_fraction=0, or remove "
            "its own"
        )

    size = dataset.train.size
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    chosen = order.argsort() < round(fraction * size)
    training, evaluated = (part.nonzero().flatten() for part in (~chosen, chosen))
    if not len(training) or not len(evaluated):
        raise ConfigError(
            f"{key}: leaves {len(training)} of {count(size, 'sample')} to train on and "
            f"{len(evaluated)} to evaluate with; both must be at least 1. Use "
            "another fraction, or add samples"
        )

    return replace(
        dataset,
        train=dataset.train.subset(training, augment=True),
        val=dataset.train.subset(evaluated, augment=False),
        # the choice depends on their number, too
        held_out=f"{key} data.val_seed={seed} of {count(size, 'sample')}",
    )


def require_same_data(values: list[tuple[str, dict[str, int]]]) -> None:
    """Check that all ranks have the same dataset.

    Args:
        values: of each rank the `Dataset.digest`, and the number of samples of each set.

    Raises:
        ConfigError: they differ.
    """
    first_digest, first_sizes = values[0]
    for rank, (_, sizes) in enumerate(values):
        for name in first_sizes | sizes:
            own_size = sizes.get(name, 0)
            first = first_sizes.get(name, 0)
            if own_size != first:
                raise ConfigError(
                    f"the dataset: the {name} set has {count(own_size, 'sample')} on rank {rank}, "
                    "but "
                    f"{first:,} on rank 0. Load the complete set on every rank, from the same "
                    "files: each rank reads its own part of it by itself"
                )

    digests = [digest for digest, _ in values]
    if different := [rank for rank, digest in enumerate(digests) if digest != first_digest]:
        raise ConfigError(
            f"the dataset: rank {different[0]} has other files than rank 0 "
            f"({count(len(different), 'rank')} in all); every machine must have the same files, of "
            "which the same can be decoded, "
            "and so the same classes and samples"
        )
