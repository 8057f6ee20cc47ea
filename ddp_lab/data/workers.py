"""The loader of samples that worker processes prepare in host memory."""

import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import RawValue
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data import Dataset as TorchDataset

from ddp_lab.config.errors import ConfigError, SampleError
from ddp_lab.data.batch import LoaderOptions
from ddp_lab.data.collated import Collated
from ddp_lab.data.dataset import Samples
from ddp_lab.data.labels import LabelRange
from ddp_lab.data.loader import Loader
from ddp_lab.data.lost_worker import find_ended, raise_once
from ddp_lab.data.trees import Tree, apply, leaves, stack, to
from ddp_lab.data.worker_process import Flag, begin_worker

QUEUES = 2**17  # bytes in shared memory that the queues of a loader's worker processes take
PREFETCHED = 2  # batches of a worker process, torch's default
EXIT_PRIORITY = 20  # before multiprocessing closes its queues, at 10
CLOSED = "batches: their Lab is closed; read them within its `with` block"
Sample = tuple[Tree, Tree]
T = TypeVar("T")
RawBatch = tuple[Tree, Tree, tuple[int, int]]  # inputs, targets, and the range of the labels


class Batches(TorchDataset[Sample]):
    """The samples of a split.

    The channels of images come last, because those that were decoded have so.
    """

    def __init__(self, data: Samples):
        self.data = data

    def __getitems__(self, batch: tuple[int, Any]) -> list[Sample]:
        """Return the samples of a batch: an epoch, and an array of indices.

        Called by the DataLoader.

        A batch that a function of the user makes is returned as one sample.
        """
        epoch, indices = batch
        if isinstance(self.data, Collated):
            try:
                return [self.data.batch(epoch, indices.tolist())]
            except ConfigError as error:
                raise SampleError(str(error)) from None
        samples = [self._sample(epoch, index) for index in indices.tolist()]
        require_equal_shapes(samples, [self.data.number(index) for index in indices.tolist()])
        if self.data.is_image:
            return [
                (apply(lambda image: image.permute(1, 2, 0), inputs), target)
                for inputs, target in samples
            ]
        return samples

    def _sample(self, epoch: int, index: int) -> Sample:
        try:
            return self.data.sample(epoch, index)
        # it would be reported by rank 0 only, but this sample is read by one rank
        except ConfigError as error:
            raise SampleError(str(error)) from None


class EpochBatches:
    """The arguments of `Batches.__getitems__` for the rest of an epoch, in order.

    They are made one by one: a large set of small samples has millions.

    Attributes:
        epoch: its number.
        indices: int64 [n], this rank's samples.
        size: samples of a batch.
    """

    def __init__(self, size: int):
        self.epoch = 0
        self.indices = np.empty(0, np.int64)
        self.size = size

    def __len__(self) -> int:
        return math.ceil(len(self.indices) / self.size)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        epoch = self.epoch
        indices = self.indices
        for at in range(0, len(indices), self.size):
            yield epoch, indices[at : at + self.size]


def require_equal_shapes(samples: Sequence[Sample], numbers: Sequence[int]) -> None:
    """Check that samples can be put into one batch.

    Args:
        samples: of the batch.
        numbers: their numbers in the dataset.

    Raises:
        SampleError: their inputs, or their targets, have different shapes or other parts.
    """
    for place, role in enumerate(("inputs", "targets")):
        forms = [
            {name: list(tensor.shape) for name, tensor in leaves(sample[place], role)}
            for sample in samples
        ]
        other = next((at for at, form in enumerate(forms) if form != forms[0]), None)
        if other is not None and forms[0].keys() != forms[other].keys():
            raise SampleError(
                f"samples {numbers[0]} and {numbers[other]} of the dataset are in one batch, but "
                f"their {role} are {', '.join(forms[0]) or None} and "
                f"{', '.join(forms[other]) or None}. Return the same parts for all samples"
            )

        if other is not None:
            name = next(name for name, shape in forms[0].items() if shape != forms[other][name])
            ways = ""
            if not isinstance(samples[0][place], torch.Tensor):
                ways = ", or pad them in collate_fn"
            raise SampleError(
                f"samples {numbers[0]} and {numbers[other]} of the dataset are in one batch, but "
                f"their {name} have the shapes {forms[0][name]} and {forms[other][name]}. Pad them "
                "to one shape in the dataset, and let the loss ignore the padding, or cut them to "
                f"one{ways}"
            )


def channels_first(images: torch.Tensor) -> torch.Tensor:
    """Return images [b, height, width, channels] as [b, channels, height, width], contiguous.

    `contiguous` would leave images of one channel with the strides of channels_last.
    """
    return images.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)


def collate(labels: LabelRange | None, is_batch: bool, samples: list[Sample]) -> RawBatch:
    """Return the batch of some samples, with the range of its labels.

    That range costs the worker less than the rank.

    Args:
        labels: measures the targets; None: nobody needs it.
        is_batch: whether the only sample is a batch.
        samples: from `Batches`.
    """
    inputs, targets = samples[0] if is_batch else stack(samples, default_collate)
    return inputs, targets, labels.measure(targets) if labels else (0, 0)


def stop_workers(loader: DataLoader[Any], ended: Flag) -> None:
    """End the worker processes of a loader within seconds, whatever they are doing."""
    ended.value = True
    if loader._iterator is not None:  # pyright: ignore[reportPrivateUsage]
        loader._iterator._shutdown_workers()  # pyright: ignore  # torch has no public name for it


def start_reading(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return a loader's iterator, for which its worker processes read."""
    batches = iter(loader)
    if loader.num_workers:
        raise_once()
    return batches


def next_batch(batches: Iterator[T]) -> T:
    """Return the next batch of a DataLoader's iterator.

    Raises:
        SampleError: a sample cannot be read, or a worker process was lost.
    """
    try:
        return next(batches)
    # of a worker process, the text is a traceback that ends with the message
    except SampleError as error:
        raise SampleError(str(error).rstrip().rpartition(f"{SampleError.__name__}: ")[2]) from None
    except (RuntimeError, OSError, EOFError) as error:
        # torch has no public name for them
        workers: Any = getattr(batches, "_workers", [])
        if lost := find_ended(error, workers):
            raise lost from None
        raise


def bytes_of_batches(data: Samples, size: int, workers: int) -> int:
    """Return the bytes in shared memory of a loader with worker processes, as `shared_bytes`.

    Args:
        data: the set.
        size: samples of a local batch.
        workers: number of processes.
    """
    if not workers:
        return 0
    batches = workers * PREFETCHED + 2
    pages = sum(math.ceil(size * tensor.nbytes / mmap.PAGESIZE) for _, tensor in leaves(data.first))
    return batches * pages * mmap.PAGESIZE + QUEUES


class WorkerLoader(Loader):
    """Loader whose worker processes load and transform samples on the host, by torch's DataLoader.

    Batches cross the bus as uint8. On a GPU they are pinned, and are copied while the device
    computes.
    """

    def __init__(self, data: Samples, options: LoaderOptions):
        super().__init__(data, options)
        # Worker processes learn the epoch from each batch: nothing that is set in the main process
        # reaches them once they run.
        self._batches: Any = EpochBatches(self.local_batch_size)
        self._ended: Flag = RawValue(ctypes.c_bool, False)
        self.loader = DataLoader(
            Batches(data),
            batch_sampler=self._batches,
            num_workers=options.num_workers,
            persistent_workers=options.num_workers > 0,
            prefetch_factor=PREFETCHED if options.num_workers else None,
            collate_fn=partial(collate, options.labels, isinstance(data, Collated)),
            worker_init_fn=partial(begin_worker, self._ended),
            pin_memory=self.device.type == "cuda",
            # without it, every `iter` would draw from the global generator
            generator=torch.Generator(),
        )

        self._stream: Iterator[RawBatch] | None = None
        # Called when the loader is freed or, where an exception's frames keep it, before this
        # process waits for its children to exit. A child of multiprocessing, as the ranks of
        # `launch` are, waits for them too, but calls neither atexit's functions nor weakref's.
        arguments = self.loader, self._ended
        self._end = Finalize(self, stop_workers, arguments, exitpriority=EXIT_PRIORITY)

    def close(self) -> None:
        self._stream = None
        self._end()

    @property
    def shared_bytes(self) -> int:
        """Bytes in shared memory.

        These are the batches that workers prepare ahead, one in use, one being freed, and the
        workers' queues.
        """
        size = min(self.local_batch_size, self.samples)
        return bytes_of_batches(self.data, size, self.loader.num_workers)

    def _start(self, order: torch.Tensor) -> None:
        if self._ended.value:
            raise ConfigError(CLOSED)
        self._batches.epoch = self.epoch
        # tensors would go through shared memory
        self._batches.indices = order[self.start :].numpy()
        self._stream = start_reading(self.loader)

    def _read(self, places: torch.Tensor) -> tuple[Tree, Tree]:
        if self._stream is None:
            raise ConfigError(CLOSED)
        inputs, targets, label_range = next_batch(self._stream)
        if self.options.labels is not None:
            self.options.labels.add(*label_range)
        inputs = to(inputs, self.device)
        if self._is_image and not isinstance(self.data, Collated):
            inputs = apply(channels_first, inputs)
        return inputs, to(targets, self.device)
