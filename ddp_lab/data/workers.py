"""The loader of samples that worker processes prepare in host memory."""

import math
import mmap
import signal
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from ddp_lab.config.errors import ConfigError, SampleError
from ddp_lab.data.batch import LoaderOptions
from ddp_lab.data.dataset import Samples
from ddp_lab.data.loader import Loader
from ddp_lab.world.process import REQUESTS

QUEUES = 2**17  # bytes in shared memory that the queues of a loader's worker processes take
RawBatch = tuple[torch.Tensor, torch.Tensor]


def ignore_signals(worker: int) -> None:
    """Ignore the signals that a scheduler or terminal sends to a whole launch: the main process handles them."""
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)


class Keys(Sampler[list[tuple[int, int]]]):
    """The batch sampler of one rank: the (epoch, index) of each sample.

    Worker processes learn the epoch from the keys: nothing that is set in the main process reaches them once they run.

    Args:
        size: samples in a local batch.

    Attributes:
        epoch: number of the epoch.
        order: the indices of the rank's samples in it, int64 [n].
    """

    def __init__(self, size: int):
        self.size, self.epoch, self.order = size, 0, torch.zeros(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.epoch
        for indices in self.order.split(self.size):
            yield [(epoch, index) for index in indices.tolist()]


class Keyed(TorchDataset[tuple[torch.Tensor, Any]]):
    """The samples of a split by (epoch, index). The channels of images come last, because those that were decoded have so."""

    def __init__(self, data: Samples):
        self.data = data

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, Any]:
        try:
            inputs, target = self.data.sample(*key)
        except ConfigError as error:  # it would be reported by rank 0 only, but this sample is read by one rank
            raise SampleError(str(error)) from None
        return inputs.permute(1, 2, 0) if self.data.is_image else inputs, target


def stop_workers(loader: DataLoader[Any]) -> None:
    """End the worker processes of a loader, also where an exception's frames keep the loader until the interpreter exits.

    There multiprocessing would end them by SIGTERM, which they ignore, and wait for them forever.
    """
    if loader._iterator is not None:  # pyright: ignore[reportPrivateUsage]
        loader._iterator._shutdown_workers()  # pyright: ignore  # torch has no public name for it


class WorkerLoader(Loader):
    """Loader whose worker processes load and transform the samples in host memory, with torch's DataLoader.

    Batches cross the bus as uint8. On a GPU they are pinned, and are copied while the device computes.
    """

    def __init__(self, data: Samples, options: LoaderOptions):
        super().__init__(data, options)
        self._keys = Keys(self.local_batch_size)
        self.loader = DataLoader(
            Keyed(data),
            batch_sampler=self._keys,
            num_workers=options.num_workers,
            persistent_workers=options.num_workers > 0,
            worker_init_fn=ignore_signals,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # without it, every `iter` would draw from the global generator
        )
        self._stream: Iterator[RawBatch] | None = None
        weakref.finalize(self, stop_workers, self.loader)

    @property
    def shared_bytes(self) -> int:
        """Bytes in shared memory: batches that workers prepare ahead, one in use, one being freed, and the workers' queues."""
        if not self.loader.num_workers:
            return 0
        batches = self.loader.num_workers * (self.loader.prefetch_factor or 0) + 2
        size = min(self.local_batch_size, self.samples)
        pages = sum(math.ceil(size * each.nbytes / mmap.PAGESIZE) for each in self.data.first)
        return batches * pages * mmap.PAGESIZE + QUEUES

    def _start(self, order: torch.Tensor) -> None:
        self._keys.epoch, self._keys.order = self.epoch, order[self.start :]
        self._stream = iter(self.loader)

    def _read(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._stream is not None, "start_epoch was not called"
        try:
            inputs, targets = next(self._stream)
        except SampleError as error:  # of a worker process, the text is a traceback that ends with the message
            raise SampleError(str(error).rstrip().rpartition(f"{SampleError.__name__}: ")[2]) from None
        inputs = inputs.to(self.device, non_blocking=True)
        if self.data.is_image:  # not contiguous(), which leaves images of one channel with the strides of channels_last
            inputs = inputs.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
        return inputs, targets.to(self.device, non_blocking=True)
