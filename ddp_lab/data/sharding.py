"""Who reads what: the same global batches for any number of ranks, from either of two loaders.

With W ranks and the global batch B, rank r takes positions r, r + W, r + 2W, ... of the epoch's permutation
(`DistributedSampler`), in local batches of B / W. So the local batches number s of all ranks are together the slice
[s * B, (s + 1) * B) of the permutation, whatever W is. Where the slices do not divide, `DistributedSampler` repeats a
few samples at the end; their targets become IGNORE here, so that every sample counts exactly once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch.utils.data import DistributedSampler

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.augment import augment, draw
from ddp_lab.data.datasets import LabelledImages

IGNORE = -100  # F.cross_entropy's ignore_index


class Batch(NamedTuple):
    """One rank's share of a global batch.

    inputs: float32 [b, channels, height, width], normalised, on the rank's device.
    targets: int64 [b], IGNORE where the sample is a repetition.
    count: samples in the GLOBAL batch, the divisor of its mean loss; known without communication.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    count: int


class Turn(NamedTuple):
    """A batch that the device will gather itself (`DeviceLoader.take`).

    size: samples of this rank's share.
    count: samples in the GLOBAL batch.
    """

    size: int
    count: int


class Shard(DistributedSampler):
    """From the middle of an epoch, too.

    Attributes:
        start: how many of this rank's own samples to leave out.
    """

    start = 0

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.start, None)

    def indices(self) -> torch.Tensor:
        """What iterating gives, int64."""
        return self.own(self.epoch)[self.start :]

    def own(self, epoch: int) -> torch.Tensor:
        """All of this rank's samples in an epoch, int64. Without a Python integer for each: that takes 5 ms for 60,000, as long
        as LeNet trains on 4,000 of them."""
        n = len(self.dataset)
        order = torch.arange(n)
        if self.shuffle:
            order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed + epoch))
        order = order.repeat(math.ceil(self.total_size / n))[: self.total_size]
        return order[self.rank :: self.num_replicas].contiguous()


class Loader(ABC):
    """Batches of one rank; a subclass says how indices become uint8 images on the device.

    Args:
        batch_size: GLOBAL; divisible by `dp_size`.
        dp_rank, dp_size: which share of every batch is this rank's.
        mean, std: one value, or one for each channel, of images scaled to [0, 1].
        shift: up to how many pixels each image is moved, in each direction.
        flip: whether half of the images are mirrored.

    Raises:
        ConfigError: as many means or standard deviations as no image has channels; a shift that moves whole images out.
    """

    def __init__(
        self,
        data: LabelledImages,
        batch_size: int,
        *,
        dp_rank: int,
        dp_size: int,
        device: torch.device,
        mean: Sequence[float],
        std: Sequence[float],
        shuffle: bool,
        seed: int = 0,
        shift: int = 0,
        flip: bool = False,
    ):
        channels, height, width = data.images.shape[1:]
        for key, values in {"data.mean": mean, "data.std": std}.items():
            if len(values) not in (1, channels):
                raise ConfigError(
                    f"{key}={list(values)}: has {len(values)} values; give 1, or 1 for each channel of the images ({channels})"
                )
        if shift > 0 and shift >= min(height, width):
            raise ConfigError(
                f"data.shift={shift}: must be smaller than the images, which are {height} x {width} pixels; "
                f"allowed: 0 to {min(height, width) - 1}"
            )
        self.data, self.batch_size, self.device = data, batch_size, device
        self.shift, self.flip = shift, flip
        self.local_batch_size = batch_size // dp_size
        self.dp_size = dp_size
        self.sampler = Shard(data.targets, dp_size, dp_rank, shuffle=shuffle, seed=seed)
        self.real = len(range(dp_rank, len(data.targets), dp_size))  # what this rank reads, less the repetitions
        mean, std = (torch.tensor(list(values), device=device).view(-1, 1, 1) for values in (mean, std))
        self.scale, self.offset = 1 / (255 * std), mean / std

    def __len__(self) -> int:
        """Steps an epoch."""
        return math.ceil(len(self.data.targets) / self.batch_size)

    def set_epoch(self, epoch: int, samples: int = 0) -> None:
        """Chooses the epoch's permutation (without it every epoch has the same order), less its first `samples`.

        Raises:
            ConfigError: so many samples are not a whole number for each share.
        """
        if samples % self.dp_size and samples < len(self.data.targets):
            raise ConfigError(
                f"resume: the checkpoint is {samples} samples into epoch {epoch}, which does not divide by {self.dp_size} "
                "replicas; use the batch_size it was made with"
            )
        self.sampler.set_epoch(epoch)
        self.sampler.start = math.ceil(samples / self.dp_size)

    def turns(self) -> Iterator[Turn]:
        """The sizes of the batches that are left of the epoch."""
        start = self.sampler.start
        for first in range(start, self.sampler.num_samples, self.local_batch_size):
            size = min(self.local_batch_size, self.sampler.num_samples - first)
            yield Turn(size, min(self.batch_size, len(self.data.targets) - first * self.dp_size))

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
        """What `augment` is to do with what is left of the epoch: int64 [3, n] as `draw` has it, for the samples of
        `Shard.indices`, on the device. None where images stay as they are."""
        moves = self._own_moves(self.sampler.epoch)
        return None if moves is None else moves[:, self.sampler.start :].to(self.device)

    def _own_moves(self, epoch: int) -> torch.Tensor | None:
        """Of all this rank's samples in an epoch, on the CPU."""
        if not (self.shift or self.flip):
            return None
        return draw(len(self.data.targets), self.shift, self.flip, self.sampler.seed, epoch)[:, self.sampler.own(epoch)]

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        return images * self.scale - self.offset

    @abstractmethod
    def _raw_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """uint8 images and int64 targets on the device, in the sampler's order; the targets may be written to."""
