"""The interface of the loaders of one rank's local batches: on the device (device_loader.py), or in workers (workers.py)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NotRequired, TypedDict, cast

import torch
from torch.utils.data import Dataset as TorchDataset

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.augment import augment, draw
from ddp_lab.data.batch import IGNORE, Batch, Turn
from ddp_lab.data.samples import Samples
from ddp_lab.data.sharding import Shard


def scale_and_offset(mean: Sequence[float], std: Sequence[float], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensors, [channels, 1, 1], with which uint8 images are normalised: images * scale - offset."""
    means, deviations = (torch.tensor(list(values), device=device).view(-1, 1, 1) for values in (mean, std))
    return 1 / (255 * deviations), means / deviations


class LoaderOptions(TypedDict):
    """The keyword arguments of `Loader` that its subclasses pass on."""

    dp_rank: int
    dp_size: int
    mean: Sequence[float]
    std: Sequence[float]
    shuffle: bool
    seed: NotRequired[int]
    crop_padding: NotRequired[int]
    flip: NotRequired[bool]


class Loader(ABC):
    """The local batches of one rank. A subclass implements how indices become uint8 images on the device.

    Args:
        data: the whole split, the same on all ranks.
        batch_size: samples in the GLOBAL batch; must be divisible by `dp_size`.
        dp_rank: number of this rank's data-parallel replica.
        dp_size: number of data-parallel replicas, among which every batch is divided.
        device: device of the batches.
        mean, std: mean and standard deviation of images in [0, 1]: one value, or one per channel.
        shuffle: whether every epoch has a random order.
        seed: seed of the sample order and the augmentation.
        crop_padding: zeros on each side of an image, in pixels, before a crop of its size at random.
        flip: whether each image is flipped left to right with probability 1/2.

    Raises:
        ConfigError: the number of means or standard deviations is neither 1 nor the number of channels, or `crop_padding` is
            not smaller than the images.
    """

    def __init__(
        self,
        data: Samples,
        batch_size: int,
        *,
        dp_rank: int,
        dp_size: int,
        device: torch.device,
        mean: Sequence[float],
        std: Sequence[float],
        shuffle: bool,
        seed: int = 0,
        crop_padding: int = 0,
        flip: bool = False,
    ):
        channels, height, width = data.shape
        for key, values in {"data.mean": mean, "data.std": std}.items():
            if len(values) not in (1, channels):
                raise ConfigError(
                    f"{key}={list(values)}: has {len(values)} values; expected 1, or 1 per channel of the images ({channels})"
                )
        if crop_padding > 0 and crop_padding >= min(height, width):
            raise ConfigError(
                f"data.crop_padding={crop_padding}: must be smaller than the images, which are {height} x {width} pixels; "
                f"allowed: 0 to {min(height, width) - 1}"
            )
        self.data, self.batch_size, self.device = data, batch_size, device
        self.crop_padding, self.flip = crop_padding, flip
        self.local_batch_size = batch_size // dp_size
        self.dp_size = dp_size
        self.sampler = Shard(cast("TorchDataset[int]", range(data.size)), dp_size, dp_rank, shuffle=shuffle, seed=seed)
        self.real = len(range(dp_rank, data.size, dp_size))  # this rank's samples without padding
        self.scale, self.offset = scale_and_offset(mean, std, device)

    def __len__(self) -> int:
        """Return the number of steps per epoch."""
        return math.ceil(self.data.size / self.batch_size)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the batches that are in shared memory at the same time."""
        return 0

    def set_epoch(self, epoch: int, samples: int = 0) -> None:
        """Select the permutation of an epoch. Without this call, every epoch has the same permutation.

        Args:
            epoch: number of the epoch.
            samples: how many samples to skip at the beginning of the permutation, summed over all ranks.

        Raises:
            ConfigError: `samples` is not divisible by the number of replicas.
        """
        if samples % self.dp_size and samples < self.data.size:
            raise ConfigError(
                f"resume: the checkpoint is {samples} samples into epoch {epoch}, which is not divisible by {self.dp_size} "
                "replicas; use the batch_size of the run that wrote it"
            )
        self.sampler.set_epoch(epoch)
        self.sampler.start = math.ceil(samples / self.dp_size)

    def turns(self) -> Iterator[Turn]:
        """Yield the sizes of the batches in the rest of the epoch."""
        start = self.sampler.start
        for first in range(start, self.sampler.num_samples, self.local_batch_size):
            size = min(self.local_batch_size, self.sampler.num_samples - first)
            yield Turn(size, min(self.batch_size, self.data.size - first * self.dp_size))

    def __iter__(self) -> Iterator[Batch]:
        start, moves = self.sampler.start, self.moves()
        first = start
        for turn, (images, targets) in zip(self.turns(), self._raw_batches(), strict=True):
            if moves is not None:
                images = augment(images, *moves[:, first - start : first - start + turn.size])
            first += turn.size
            if first > self.real:
                targets[self.real - first :] = IGNORE
            yield Batch(self.normalise(images), targets, turn.count)

    def moves(self) -> torch.Tensor | None:
        """Return the shifts and flips of the remaining samples of the epoch, those of `Shard.indices`.

        Returns:
            int64 [3, n] on the device, in the layout of `augment.draw`; None without augmentation.
        """
        moves = self._own_moves(self.sampler.epoch)
        return None if moves is None else moves[:, self.sampler.start :].to(self.device)

    def _own_moves(self, epoch: int) -> torch.Tensor | None:
        """Return the shifts and flips of all of this rank's samples in an epoch, int64 [3, n] on the CPU."""
        if not (self.crop_padding or self.flip):
            return None
        return draw(self.data.size, self.crop_padding, self.flip, self.sampler.seed, epoch)[:, self.sampler.own(epoch)]

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """Return uint8 images, [b, channels, height, width], as float32: scaled to [0, 1], minus `mean`, divided by `std`."""
        return (images * self.scale).sub_(self.offset)

    @abstractmethod
    def _raw_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield uint8 images and int64 targets on the device, in the sampler's order; the caller may write to the targets."""
