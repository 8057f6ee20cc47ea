"""Two loaders of the same batches: one gathers them on the device, which holds the whole dataset, one in worker processes."""

import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.augment import augment
from ddp_lab.data.datasets import LabelledImages, Samples
from ddp_lab.data.sharding import IGNORE, Loader, LoaderOptions, Shard

Gather = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


class DeviceLoader(Loader):
    """Loader that keeps the whole dataset on the device as uint8 and gathers each batch there: no workers, no host copies.

    Args:
        data: LabelledImages.
        num_workers: ignored; accepted so that both loaders take the same arguments.

    Raises:
        ConfigError: the images are not in memory.
    """

    def __init__(
        self,
        data: Samples,
        batch_size: int,
        *,
        device: torch.device,
        num_workers: int,
        **options: Unpack[LoaderOptions],
    ):
        if not isinstance(data, LabelledImages):
            raise ConfigError(
                "data.loader=device: is not supported by images that are read one by one; use data.loader=workers"
            )
        super().__init__(data, batch_size, device=device, **options)
        self.images, self.targets = data.images.to(device), data.targets.to(device)
        # The buffers that `take` reads; a CUDA graph captures their addresses. They hold the epoch's order, targets and shifts
        # and flips ("moves"), and the position in the epoch.
        self._order = torch.zeros(self.sampler.num_samples, dtype=torch.int64, device=device)
        self._wanted = torch.zeros_like(self._order)
        self._moves = self._order.new_zeros(3, len(self._order)) if self.shift or self.flip else None
        self._places = torch.arange(self.local_batch_size, device=device)
        self._first = torch.zeros((), dtype=torch.int64, device=device)
        self._ahead: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # drawn by `look_ahead`, by epoch
        self._gather: Gather = self._gather_eagerly

    def _raw_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        indices = self.sampler.indices()
        if not len(indices):
            return
        for index in indices.to(self.device).split(self.local_batch_size):
            yield self.images[index], self.targets[index]

    def deal(self) -> None:
        """Write the order, targets and moves of the rest of the epoch into the buffers that `take` reads."""
        epoch, start = self.sampler.epoch, self.sampler.start
        order, moves = self._ahead.get(epoch) or self._draw(epoch)
        self._order[start:] = order[start:].to(self.device)
        self._wanted[start:] = self.targets[self._order[start:]]
        self._wanted[self.real :] = IGNORE
        if self._moves is not None and moves is not None:
            self._moves[:, start:] = moves[:, start:].to(self.device)
        self._first.fill_(start)

    def look_ahead(self) -> None:
        """Draw the next epoch's order and moves while the device still computes this epoch's batches.

        A permutation of 240,000 samples takes the host 3 to 8 ms. In that time LeNet trains on 10,000 to 20,000 samples on
        four GPUs.
        """
        self._ahead = {self.sampler.epoch + 1: self._draw(self.sampler.epoch + 1)}

    def _draw(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.sampler.own(epoch), self._own_moves(epoch)

    def compile(self, fuse: Callable[[Gather], Gather]) -> None:
        """Compile `take` with `fuse`, which is torch.compile with its options, to fuse its kernels."""
        self._gather = fuse(self._gather_eagerly)

    def take(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of the next batch.

        Call `deal` before the first batch of an epoch. Nothing is decided on the host, so a CUDA graph can capture it.

        Args:
            size: samples in this rank's local batch, from `turns`.

        Returns:
            float32 [size, channels, height, width] and int64 [size], with IGNORE for padding.
        """
        return self._gather(size)

    def _gather_eagerly(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        places = self._places[:size] + self._first
        self._first += size
        images = self.images[self._order[places]]
        if self._moves is not None:  # the same for the loader's whole life, so a captured graph remains correct
            images = augment(images, *self._moves[:, places])
        return self.normalise(images), self._wanted[places]


def ignore_signals(worker: int) -> None:
    """Ignore the signals that a scheduler or terminal sends to a whole launch: the main process handles them."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class Keys(Sampler[list[tuple[int, int]]]):
    """The batch sampler of one rank: the (epoch, index) of each sample, in endless epochs from a position on.

    It does not stop after an epoch, so worker processes load the first batches of the next epoch while this one ends. They
    learn the epoch from the keys: nothing that is set in the main process reaches them once they run.

    Args:
        shard: this rank's samples. If it does not shuffle, all epochs are the same one, and only one is repeated.
        size: samples in a local batch.

    Attributes:
        position: epoch and number of this rank's samples to skip, for the next call of `iter`.
    """

    def __init__(self, shard: Shard, size: int):
        self.shard, self.size = shard, size
        self.position: tuple[int, int] = (0, 0)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, start = self.position
        while True:
            for indices in self.shard.own(epoch)[start:].split(self.size):
                yield [(epoch, index) for index in indices.tolist()]
            epoch, start = self.after(epoch)

    def after(self, epoch: int) -> tuple[int, int]:
        """Return the position after an epoch."""
        return (epoch + self.shard.shuffle, 0)


class Keyed(TorchDataset[tuple[torch.Tensor, int]]):
    """The samples of a split by (epoch, index). The channels come last, because images that were decoded have them last."""

    def __init__(self, data: Samples):
        self.data = data

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        try:
            image, target = self.data.sample(*key)
        except ConfigError as error:  # it would be reported by rank 0 only, but this sample is read by one rank
            raise RuntimeError(str(error)) from None
        return image.permute(1, 2, 0), target


def stop_workers(loader: DataLoader[Any]) -> None:
    """End the worker processes of a loader, also where an exception's frames keep the loader until the interpreter exits.

    There multiprocessing would end them by SIGTERM, which they ignore, and wait for them forever.
    """
    if loader._iterator is not None:  # pyright: ignore[reportPrivateUsage]
        loader._iterator._shutdown_workers()  # pyright: ignore  # torch has no public name for it


class WorkerLoader(Loader):
    """Loader whose worker processes load and transform the samples in host memory, with torch's DataLoader.

    Batches cross the bus as uint8. On a GPU they are pinned, and are copied while the device computes. The workers begin an
    epoch before the previous one ends.

    Args:
        num_workers: number of worker processes; 0 loads in the main process.
    """

    def __init__(
        self,
        data: Samples,
        batch_size: int,
        *,
        device: torch.device,
        num_workers: int,
        **options: Unpack[LoaderOptions],
    ):
        super().__init__(data, batch_size, device=device, **options)
        self._keys = Keys(self.sampler, self.local_batch_size)
        self.loader = DataLoader(
            Keyed(data),
            batch_sampler=self._keys,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=ignore_signals,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # without it, every `iter` would draw from the global generator
        )
        self._stream: Iterator[tuple[torch.Tensor, torch.Tensor]] | None = None
        weakref.finalize(self, stop_workers, self.loader)

    def _raw_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        epoch, start = self.sampler.epoch, self.sampler.start
        if start >= self.sampler.num_samples:
            return
        if self._stream is None or self._keys.position != (epoch, start):  # the first epoch, or a resumed or abandoned one
            self._keys.position = (epoch, start)
            self._stream = iter(self.loader)
        for turn in self.turns():
            images, targets = next(self._stream)
            start += turn.size
            self._keys.position = (epoch, start) if start < self.sampler.num_samples else self._keys.after(epoch)
            # Not contiguous(), which leaves images of one channel with the strides of channels_last.
            images = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
            yield images, targets.to(self.device, non_blocking=True)


LOADERS = {"device": DeviceLoader, "workers": WorkerLoader}
