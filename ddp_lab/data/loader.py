"""The interface of loaders of one rank's local batches, and the loader on the device."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.data.batch import Batch, LoaderOptions, apply, local_order
from ddp_lab.data.dataset import Samples

if TYPE_CHECKING:
    from ddp_lab.data.trees import Tree
    from ddp_lab.world.ranks import Ranks

Tensors = tuple[torch.Tensor, torch.Tensor]
Trees = tuple["Tree", "Tree"]


def scale_and_offset(mean: Sequence[float], std: Sequence[float], device: torch.device) -> Tensors:
    """Return the tensors [channels, 1, 1] that normalise uint8 images: images * scale - offset."""
    means, deviations = (
        torch.tensor(list(values), device=device).view(-1, 1, 1) for values in (mean, std)
    )
    return 1 / (255 * deviations), means / deviations


class Loader(ABC):
    """The local batches of one rank, augmented and normalised on its device.

    A subclass reads the samples.

    `set_epoch` selects an epoch, and iterating yields its batches. A CUDA graph makes the same
    calls one by one: `start_epoch`, and `next_batch` for each of `counts`.

    Args:
        data: the whole set, the same on all ranks.
        options: how batches are made.

    Raises:
        ConfigError: the number of means or standard deviations is neither 1 nor the number of
            channels, or `crop_padding` is not smaller than the images.
    """

    def __init__(self, data: Samples, options: LoaderOptions):
        if data.is_image:
            check_images(data, options)
        elif options.crop_padding or options.flip:
            raise ConfigError(
                f"data.crop_padding={options.crop_padding}, data.flip={str(options.flip).lower()}: "
                "are for images (uint8, [channels, height, width]); the inputs of these data are "
                f"{describe_inputs(data)}. Use 0 and false"
            )

        self.data = data
        self.options = options
        self.device = options.device
        self._size = data.size
        self._is_image = data.is_image
        if options.labels is not None:
            options.labels.expect_loader()

        self.batch_size = options.batch_size
        self.local_batch_size = options.batch_size // options.dp_size
        rank = options.dp_rank
        ranks = options.dp_size
        self.order = partial(
            local_order, data.size, rank, ranks, options.seed if options.shuffle else None
        )
        self.samples = math.ceil(data.size / ranks)  # of this rank, padding included
        self.scale, self.offset = scale_and_offset(options.mean, options.std, options.device)
        # where `start_epoch` begins: the epoch, and this rank's samples before
        self.epoch = 0
        self.start = 0
        # order and augmentation offsets, by epoch
        self._drawn: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        # What `next_batch` reads: a CUDA graph captures the addresses.
        self._range = torch.arange(self.local_batch_size, device=self.device)
        self._first = self._range.new_zeros(())
        augments = options.crop_padding > 0 or options.flip
        self._offsets = self._range.new_zeros(3, self.samples) if augments else None

        if augments:  # here, because the methods may be compiled
            from ddp_lab.data.augment import augment, draw_offsets

            self._augment = augment
            self._draw_offsets = draw_offsets
        self._compute: Callable[[int], Trees] = self._compute_eagerly

    def __len__(self) -> int:
        """Return the number of steps per epoch."""
        return math.ceil(self.data.size / self.batch_size)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the batches that are in shared memory at the same time."""
        return 0

    def notes(self) -> list[str]:
        """Return lines for the log about how the samples are read; most often there are none."""
        return []

    def stream_position(self, ranks: "Ranks") -> dict[str, Any]:
        """Return what a checkpoint has of the readers of a stream, as JSON. Collective.

        Of a map-style dataset, it is empty, and nothing is exchanged.
        """
        return {}

    def begin_at(self, stream: Mapping[str, Any]) -> None:  # noqa: B027, of a stream only
        """Take over what a checkpoint has of the readers of a stream, which saves reading."""

    def close(self) -> None:  # noqa: B027, a loader without processes has nothing to end
        """End the processes of the loader. It can be used no more."""

    def set_epoch(self, epoch: int, samples: int = 0) -> None:
        """Select an epoch, and so its order and augmentation.

        Without this call, every epoch is the same.

        Args:
            epoch: number of the order of the epoch, as `Progress.order`.
            samples: how many samples to skip at its beginning, summed over all ranks.

        Raises:
            ConfigError: `samples` is not divisible by the number of replicas.
        """
        replicas = self.options.dp_size
        if samples % replicas and samples < self.data.size:
            raise ConfigError(
                f"resume: the checkpoint is {count(samples, 'sample')} into an epoch, which is not "
                f"divisible by {replicas} replicas; use the batch_size of the run that wrote it"
            )
        self.epoch = epoch
        self.start = math.ceil(samples / replicas)

    def counts(self) -> Iterator[int]:
        """Yield the samples in each GLOBAL batch of the rest of the epoch, without padding."""
        for first in range(self.start, self.samples, self.local_batch_size):
            yield min(self.batch_size, self._size - first * self.options.dp_size)

    def __iter__(self) -> Iterator[Batch]:
        self.start_epoch()
        for global_size in self.counts():
            yield self.next_batch(global_size)

    def start_epoch(self) -> None:
        """Go to the beginning of the selected epoch, or to where it was resumed."""
        self._drawn = {self.epoch: self._drawn.get(self.epoch) or self._draw(self.epoch)}
        order, offsets = self._drawn[self.epoch]
        self._first.fill_(self.start)
        if self._offsets is not None and offsets is not None:
            self._offsets.copy_(offsets)
        self._start(order)

    def prefetch_epoch(self) -> None:
        """Draw the next epoch's order and augmentation offsets while the device still computes.

        A permutation of 240,000 samples takes the host 3 to 8 ms. In that time LeNet trains on
        10,000 to 20,000 samples on four GPUs.
        """
        self._drawn = {self.epoch + 1: self._draw(self.epoch + 1)}

    def _draw(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        order = self.order(epoch)
        options = self.options
        if self._offsets is None:
            return order, None
        return order, self._draw_offsets(
            self.data.size, options.crop_padding, options.flip, options.seed, epoch
        )[:, order]

    def next_batch(self, global_size: int) -> Batch:
        """Return the next batch, padded so that every rank has as many samples.

        Its number of samples is the next of `counts`.
        """
        size = -(-global_size // self.options.dp_size)
        return Batch(*self._compute(size), global_size)

    def first(self, number: int, spread: bool = False) -> Batch:
        """Return the first samples of this rank, at most `number`, as a batch without augmentation.

        Nothing else is read.

        Unlike an iteration it needs no worker processes, and has no larger batch on the device.

        Args:
            number: of samples.
            spread: whether they are those at equal distances in the set, in place of the first.
        """
        indices = self.order(self.epoch).tolist()
        if spread and len(indices) > number:
            indices = [indices[place * len(indices) // number] for place in range(number)]
        indices = indices[:number]
        from ddp_lab.data.trees import to

        inputs, targets = to(self.data.batch(self.epoch, indices), self.device)
        return Batch(*self._as_arguments(inputs, targets), len(indices) * self.options.dp_size)

    def compile(
        self, compile_fn: Callable[[Callable[[int], Trees]], Callable[[int], Trees]]
    ) -> None:
        """Compile `next_batch` with `compile_fn` to fuse its kernels.

        `compile_fn` is torch.compile with its options.
        """
        self._compute = compile_fn(self._compute_eagerly)

    def _compute_eagerly(self, size: int) -> Trees:
        """Return the normalised inputs and the targets of a batch.

        Nothing is decided by values on the device.
        """
        places = self._range[:size] + self._first  # among this rank's samples of the epoch
        self._first += size
        inputs, targets = self._read(places)
        if (
            self._offsets is not None
            and isinstance(inputs, torch.Tensor)
            and isinstance(targets, torch.Tensor)
        ):
            offsets = self._offsets.index_select(1, places)
            padding = self.options.crop_padding
            inputs = self._augment(inputs, offsets, padding)
            if targets.dim() == 3:
                targets = self._augment(targets[:, None], offsets, padding, self.options.ignore)[
                    :, 0
                ]
        return self._as_arguments(inputs, targets)

    def _as_arguments(self, inputs: "Tree", targets: "Tree") -> Trees:
        """Return samples as the model and the loss take them."""
        if self._is_image and isinstance(inputs, torch.Tensor):
            inputs = (inputs * self.scale).sub_(self.offset)
        if isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor):
            return as_numbers(inputs), as_numbers(targets)
        return apply(as_numbers, inputs), apply(as_numbers, targets)

    @abstractmethod
    def _start(self, order: torch.Tensor) -> None:
        """Prepare for reading this rank's samples of the epoch, in this order, from `start` on."""

    @abstractmethod
    def _read(self, places: torch.Tensor) -> Trees:
        """Return the inputs and targets at these places of the order, on the device."""


def check_images(data: Samples, options: LoaderOptions) -> None:
    """Check the options of images. The arguments and errors are those of `Loader`."""
    channels, height, width = data.shape
    if data.is_tree and (options.crop_padding or options.flip):
        raise ConfigError(
            f"data.crop_padding={options.crop_padding}, data.flip={str(options.flip).lower()}: "
            "would not change targets that are a tuple or dict, such as boxes, together with the "
            "images. Use 0 and false, and augment in the dataset"
        )

    for key, values in {"data.mean": options.mean, "data.std": options.std}.items():
        if len(values) not in (1, channels):
            raise ConfigError(
                f"{key}={list(values)}: has {len(values)} values; expected 1, or 1 per channel of "
                f"the images ({channels})"
            )

    if options.crop_padding > 0 and options.crop_padding >= min(height, width):
        raise ConfigError(
            f"data.crop_padding={options.crop_padding}: must be smaller than the images, which are "
            f"{height} x {width} pixels; allowed: 0 to {min(height, width) - 1}"
        )


def describe_inputs(data: Samples) -> str:
    """Return the shape of an input, or the type of inputs that are several tensors."""
    inputs, _ = data.first
    if isinstance(inputs, torch.Tensor):
        return str(list(data.shape))
    return f"a {type(inputs).__name__}"


def as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return uint8 and uint16 numbers such as tokens as int64; others and images as they are."""
    if tensor.dtype == torch.uint16:  # of which devices have few kernels
        return tensor.view(torch.int16).long() & 0xFFFF
    return tensor.long() if tensor.dtype == torch.uint8 else tensor


def select(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return some rows of a tensor, also of uint16."""
    if tensor.dtype == torch.uint16:
        return tensor.view(torch.int16).index_select(0, index).view(torch.uint16)
    return tensor.index_select(0, index)


class DeviceLoader(Loader):
    """Loader that keeps the whole dataset on the device as uint8 and gathers each batch there.

    It needs no workers and no copies from the host.

    A CUDA graph can capture its `next_batch`.

    Raises:
        ConfigError: the images are not in memory.
    """

    def __init__(self, data: Samples, options: LoaderOptions):
        samples = data.in_memory()
        if samples is None:
            raise ConfigError(
                "data.loader=device: is not supported by samples that are read one by one; use "
                "data.loader=workers"
            )
        super().__init__(data, options)
        self.inputs = apply(self._on_device, samples.inputs)
        self.targets = apply(self._on_device, samples.targets)
        self._order = self._range.new_zeros(self.samples)
        labels = options.labels
        self._labels = None if labels is None else labels.measure(samples.targets)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def _start(self, order: torch.Tensor) -> None:
        self._order.copy_(order)
        if self.options.labels is not None and self._labels is not None:
            self.options.labels.add(*self._labels)

    def _read(self, places: torch.Tensor) -> Trees:
        index = self._order.index_select(0, places)
        # On a CPU ten times as fast as images[index]: 3 us in place of 32 for 64 images of 28 x 28.
        if isinstance(self.inputs, torch.Tensor) and isinstance(self.targets, torch.Tensor):
            return select(self.inputs, index), select(self.targets, index)
        return apply(lambda tensor: select(tensor, index), (self.inputs, self.targets))


def loader_class(name: str) -> type[Loader]:
    """Return the loader that a value of data.loader chooses."""
    if name == "device":
        return DeviceLoader
    from ddp_lab.data.workers import WorkerLoader

    return WorkerLoader
