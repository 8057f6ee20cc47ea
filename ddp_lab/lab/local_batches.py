"""This rank's batches of any dataset, as the user's loop sees them.

They have no padding, which a step adds again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.data.batch import Batch, LoaderOptions, size_of_evaluated
from ddp_lab.data.dataset import InMemory, Samples
from ddp_lab.data.loader import DeviceLoader, Loader
from ddp_lab.data.sources import Reading, require_map_style, samples_of
from ddp_lab.data.trees import (
    Tree,
    form_of,
    number_of_bytes,
    pad,
    require_one_size,
    require_tensors,
    rows,
    size,
    to,
)
from ddp_lab.data.workers import WorkerLoader
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.performance import DATA_SHARE

KEPT = 8  # datasets whose loaders are kept

Purpose = Literal["shuffled", "ordered", "evaluation"]


@dataclass(frozen=True)
class CurrentBatch:
    """The batch that the loop has now.

    Attributes:
        order: number of the order of its epoch.
        samples: samples of the epoch up to its end, over all ranks.
        num_valid: samples of this rank.
        size: the same with padding, which is equal on all ranks.
        global_size: samples over all ranks.
        spare: inputs and targets of one sample, with which a rank is padded that has none.
    """

    order: int
    samples: int
    num_valid: int
    size: int
    global_size: int
    spare: tuple[Tree, Tree]


@dataclass(frozen=True)
class Kept:
    """A dataset with its loaders.

    Attributes:
        dataset: of the user; it is kept, so that its id stays its own.
        samples: those of the dataset.
        loaders: one for each purpose for which it has been used.
    """

    dataset: Any
    samples: Samples
    loaders: dict[Purpose, Loader]


class LocalBatches:
    """The loaders of datasets, and the batch that the loop has now.

    Args:
        strategy: knows which samples this rank reads.
        batch_size: samples in the global batch.
        reading: how the samples of a dataset are read. Its seed is also that of their order.
        num_workers: processes that read a dataset which is not in memory.
        readers: number of parts of a stream that are read in turn.
        accumulate: number of gradient-accumulation steps.

    Attributes:
        current: the batch that the loop has now; None outside of `iterate`.
    """

    def __init__(
        self,
        strategy: Strategy,
        batch_size: int,
        reading: Reading,
        num_workers: int,
        readers: int = 1,
        accumulate: int = 1,
    ):
        self.strategy = strategy
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.readers = readers
        self.accumulate = accumulate
        self.reading = reading
        self.seed = reading.seed
        self.current: CurrentBatch | None = None
        # by the id of the dataset, the most recently used one last
        self._kept: dict[int, Kept] = {}
        self._iterated: list[Loader] = []  # of the loops that have not ended

    def loader(self, dataset: Any, purpose: Purpose, argument: str = "the dataset") -> Loader:
        """Return the loader of a dataset, the same one for the same dataset and purpose.

        Args:
            dataset: of the user.
            purpose: a shuffled or ordered loop, or an evaluation, which may be in the middle of a
                loop.
            argument: of the user, whose value the dataset is, for the message.

        Raises:
            ConfigError: it is neither map-style nor a stream to train on, is empty, or its first
                sample has not the parts that `reading` names.
        """
        if purpose == "evaluation":
            require_map_style(dataset, argument)
        entry = self._kept.pop(id(dataset), None)
        if entry is None:
            entry = Kept(dataset, self._samples_of(dataset, purpose, argument), {})
            self._make_room()
        self._kept[id(dataset)] = entry
        if purpose not in entry.loaders:
            samples = entry.samples
            is_here = isinstance(samples, InMemory) and samples.device == self.strategy.device
            make: Callable[[Any, LoaderOptions], Loader] = WorkerLoader
            if samples.is_endless:
                from ddp_lab.data.stream_loader import StreamLoader

                make = StreamLoader
            elif is_here:
                make = DeviceLoader
            entry.loaders[purpose] = make(samples, self._options(purpose))
        return entry.loaders[purpose]

    def close(self) -> None:
        """End the worker processes of all loaders."""
        for entry in self._kept.values():
            close_all(entry)
        self._kept.clear()

    def _make_room(self) -> None:
        """Forget the least recently used datasets until there is room for another one.

        Those that a loop still reads remain.
        """
        for key, entry in list(self._kept.items()):
            if len(self._kept) >= KEPT and not any(
                each in self._iterated for each in entry.loaders.values()
            ):
                close_all(self._kept.pop(key))

    def _samples_of(self, dataset: Any, purpose: Purpose, argument: str) -> Samples:
        """Return the samples of a dataset. The arguments and errors are those of `loader`."""
        if isinstance(dataset, IterableDataset) and purpose != "evaluation":
            from ddp_lab.data.stream import Stream, copies_of

            stream = Stream(copies_of(dataset, argument), self.reading, self.readers)
            stream.check(dataset)
            return stream
        require_map_style(dataset, argument)
        if self.readers > 1:
            raise ConfigError(
                f"readers={self.readers}: is for a stream, an IterableDataset, but {argument} is a "
                "map-style dataset, which num_workers processes read by number. Leave readers out"
            )
        return self._place(samples_of(dataset, self.reading))

    def _place(self, samples: Samples) -> Samples:
        """Return samples in memory on the device, if that has room for them; others as they are."""
        device = self.strategy.device
        runtime = self.strategy.runtime
        if not isinstance(samples, InMemory):
            return samples
        parts = samples.inputs, samples.targets
        if device.type == "cuda" and number_of_bytes(parts) > DATA_SHARE * runtime.free_memory():
            return samples
        return InMemory(*to(parts, device))

    def _options(self, purpose: Purpose) -> LoaderOptions:
        strategy = self.strategy
        batch_size = self.batch_size
        if purpose == "evaluation":
            batch_size = size_of_evaluated(batch_size, strategy.dp_size, self.accumulate)
        return LoaderOptions(
            batch_size=batch_size,
            dp_rank=strategy.dp_rank,
            dp_size=strategy.dp_size,
            device=strategy.device,
            mean=[0.0],
            std=[1.0],
            shuffle=purpose == "shuffled",
            seed=self.seed,
            num_workers=self.num_workers,
            labels=strategy.task.labels,
        )

    def iterate(self, loader: Loader, order: int, samples: int) -> Iterator[tuple[Any, Any]]:
        """Yield the batches of an epoch without padding.

        Args:
            loader: from `loader`.
            order: number of the order of the epoch, as in `Progress`.
            samples: samples to skip, over all ranks.
        """
        loader.set_epoch(order, samples)
        self._iterated.append(loader)
        try:
            for inputs, targets, global_size in loader:
                samples += global_size
                num_valid = self.strategy.valid_samples(global_size)
                self.current = CurrentBatch(
                    order=order,
                    samples=samples,
                    num_valid=num_valid,
                    size=size(inputs),
                    global_size=global_size,
                    spare=rows((inputs, targets), slice(1)),
                )
                yield rows(inputs, slice(num_valid)), rows(targets, slice(num_valid))
        finally:
            self.current = None
            self._iterated.remove(loader)

    def padded(self, inputs: Tree, targets: Tree) -> tuple[Batch, CurrentBatch | None]:
        """Return a local batch with padding, and which batch of `iterate` it is.

        With padding it has the same size on every rank.

        Args:
            inputs, targets: the batch that the loop has now, or another one of batch_size /
                replicas samples.

        Raises:
            ConfigError: it has another number of samples.
        """
        samples = self._samples_in(inputs, targets)
        current = self.current
        full = self.batch_size // self.strategy.dp_size
        if current and samples == current.num_valid:
            if not samples and not isinstance(inputs, torch.Tensor):
                inputs, targets = self._in_place_of_none(inputs, targets, current.spare)
            return Batch(
                pad(inputs, current.size), pad(targets, current.size), current.global_size
            ), current

        if samples != full:
            if current and current.num_valid != full:
                expected = f"{current.num_valid}, as the last one from `batches`, or {full}"
            else:
                expected = full
            raise ConfigError(
                f"step: got {count(samples, 'sample')} on rank {self.strategy.runtime.rank}, "
                "expected "
                f"{expected}: batch_size={self.batch_size} is that of all ranks, and is divided "
                f"among {self.strategy.dp_size} replicas"
            )
        return Batch(inputs, targets, self.batch_size), None

    def _samples_in(self, inputs: Any, targets: Any) -> int:
        """Return the number of samples of a batch that the loop passes.

        Raises:
            ConfigError: it does not consist of tensors with as many rows.
        """
        if isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor):
            if len(inputs) != len(targets):
                raise ConfigError(
                    f"step: got {count(len(inputs), 'input')} and {count(len(targets), 'target')}; "
                    "a sample has one "
                    "of each"
                )
            return len(inputs)
        require_tensors("step: inputs", inputs)
        require_tensors("step: targets", targets)
        if inputs is None:
            raise ConfigError(
                "step: got no inputs; pass a tensor, or a tuple or dict of tensors, [b, ...]"
            )
        return require_one_size("step", inputs=inputs, targets=targets)

    def _in_place_of_none(
        self, inputs: Tree, targets: Tree, spare: tuple[Tree, Tree]
    ) -> tuple[Tree, Tree]:
        """Return one sample with which a rank is padded that has none.

        Zeros may be no sample, such as a mask of nothing, of which a model may make NaN.

        Args:
            inputs, targets: the batch without a sample.
            spare: the sample, unless the loop has changed the form of the batch.
        """
        batch = inputs, targets
        return spare if form_of(batch) == form_of(spare) else batch


def close_all(entry: Kept) -> None:
    """End the worker processes of the loaders of a dataset."""
    for loader in entry.loaders.values():
        loader.close()
