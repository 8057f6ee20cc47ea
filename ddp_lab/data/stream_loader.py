"""The loader of a stream: the local batches of a rank, which its processes read ahead."""

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from multiprocessing import RawValue
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ddp_lab.config.errors import ConfigError, SampleError
from ddp_lab.config.errors import count as count_of
from ddp_lab.data.batch import Batch, LoaderOptions
from ddp_lab.data.dataset import Samples
from ddp_lab.data.labels import LabelRange
from ddp_lab.data.loader import Loader, Trees
from ddp_lab.data.stream import Position, Reader, Stream
from ddp_lab.data.stream_state import StateKeeper, merge
from ddp_lab.data.trees import Tree, apply, form_of, leaves, stack, to
from ddp_lab.data.worker_process import Flag, begin_worker
from ddp_lab.data.workers import (
    CLOSED,
    EXIT_PRIORITY,
    QUEUES,
    next_batch,
    require_equal_shapes,
    start_reading,
    stop_workers,
)
from ddp_lab.observe.log import log
from ddp_lab.world.ranks import Ranks

PREFETCHED = 2  # chunks of a process


class Chunk(NamedTuple):
    """Some samples of a local batch, which one process reads.

    Attributes:
        inputs, targets: [n, ...].
        label_range: of the targets.
        positions: of readers with a state, by their numbers.
        problem: why a dataset has no states; "": it has, or it is not known.
    """

    inputs: Tree
    targets: Tree
    label_range: tuple[int, int]
    positions: dict[int, Position]
    problem: str


class Chunks(IterableDataset[Chunk]):
    """The samples of a stream that one process reads, in chunks of which each is in one batch.

    Attributes:
        stream: of which they are.
        first, step: the process reads the samples first, first + step, ... of the training.
        size: samples of a chunk.
        positions: of readers, from which they begin.
        labels: measures the targets; None: nobody needs it.
    """

    def __init__(
        self,
        stream: Stream,
        first: int,
        step: int,
        size: int,
        positions: Mapping[int, Position],
        labels: LabelRange | None,
    ):
        self.stream = stream
        self.first = first
        self.step = step
        self.size = size
        self.positions = positions
        self.labels = labels

    def __iter__(self) -> Iterator[Chunk]:
        keepers: dict[int, StateKeeper] = {}
        for begin in count(self.first, self.step * self.size):
            numbers = range(begin, begin + self.step * self.size, self.step)
            samples = [self._take(keepers, number) for number in numbers]
            try:
                if self.stream.has_fixed_shapes:
                    require_equal_shapes(samples, numbers)
                inputs, targets = self.stream.collate(samples, begin, default_collate)
            except ConfigError as error:
                raise SampleError(str(error)) from None
            kept = {reader: keeper.keep() for reader, keeper in keepers.items()}
            yield Chunk(
                inputs,
                targets,
                self.labels.measure(targets) if self.labels else (0, 0),
                {reader: position for reader, position in kept.items() if position is not None},
                next((keeper.problem for keeper in keepers.values() if keeper.problem), ""),
            )

    def _take(self, keepers: dict[int, StateKeeper], number: int) -> Any:
        """Return a sample of the training by its number."""
        index = number % self.stream.readers
        of_reader = number // self.stream.readers
        if index not in keepers:
            position = self.positions.get(index, Position())
            if position.number > of_reader:
                position = Position()
            try:
                keepers[index] = StateKeeper(Reader(self.stream, index, position))
            except ConfigError as error:
                raise SampleError(str(error)) from None
        keeper = keepers[index]
        reader = keeper.reader
        while keeper.is_trying and reader.position.number < of_reader:
            keeper.compare(reader.draw())
        sample = reader.take(of_reader)
        if keeper.is_trying:
            keeper.compare(sample)
        return sample


def as_it_is(chunk: Any) -> Chunk:
    """Return a chunk, of which torch would else convert the parts."""
    return chunk


class ReaderProcess:
    """A process that reads chunks ahead.

    Each has a DataLoader of its own, so that a dataset that divides itself among the workers of a
    DataLoader sees one only: the readers divide it already.
    """

    def __init__(self, chunks: Chunks, pin_memory: bool):
        self._ended: Flag = RawValue(ctypes.c_bool, False)
        loader = DataLoader(
            chunks,
            batch_size=None,
            num_workers=1,
            collate_fn=as_it_is,
            worker_init_fn=partial(begin_worker, self._ended),
            persistent_workers=True,
            prefetch_factor=PREFETCHED,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # as in WorkerLoader
        )
        self._end = Finalize(self, stop_workers, (loader, self._ended), exitpriority=EXIT_PRIORITY)
        self._chunks = start_reading(loader)

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next_batch(self._chunks)

    def close(self) -> None:
        """End the process."""
        self._end()


class StreamLoader(Loader):
    """Loader of a stream, which has one epoch without an end. No batch is a partial one.

    Args:
        data: the stream.
        options: how batches are made. `num_workers` is the most processes that read for this rank;
            each has other readers. With one reader, or with a collate_fn, which needs all samples
            of a batch, there is one process; with 0 the rank reads itself.

    Raises:
        ConfigError: the options change samples by their numbers, or as `Loader`.
    """

    def __init__(self, data: Samples, options: LoaderOptions):
        assert isinstance(data, Stream), "other samples have loaders of their own"
        if options.crop_padding or options.flip:
            raise ConfigError(
                f"data.crop_padding={options.crop_padding}, data.flip="
                f"{str(options.flip).lower()}: are drawn for all samples of an epoch, of which a "
                "stream has no number. Use 0 and false, and augment in the dataset"
            )
        super().__init__(data, options)
        self._stream = data
        self.positions: dict[int, Position] = {}
        replicas = options.dp_size
        self._readers = data.readers // math.gcd(data.readers, replicas)  # of this rank
        self._processes = number_of_processes(
            options.num_workers,
            1 if data.reading.collate_fn else math.gcd(self._readers, self.local_batch_size),
        )
        self._sources: list[Iterator[Chunk]] = []
        self._problem = ""
        self._is_closed = False

    def notes(self) -> list[str]:
        """Return a line about who reads the stream, and in which order."""
        readers = self.data.readers
        replicas = self.options.dp_size
        shared = math.gcd(readers, replicas)
        order = "in the order in which the stream yields them"
        if readers > 1:
            order = (
                f"in the order of data.readers={readers}: sample i is from reader i % {readers}. "
                f"A resume needs data.readers={readers}"
            )
        where = "itself"
        if self._processes:
            where = f"in {count_of(self._processes, 'process')} of its own"
        line = f"the samples of the stream are trained on {order}. Each rank reads {where}"
        if shared < replicas:
            line += (
                f", and keeps one sample of {replicas // shared}: {replicas // shared} replicas "
                "read the same ones"
            )
        return [line]

    def close(self) -> None:
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        for source in self._sources:
            if isinstance(source, ReaderProcess):
                source.close()
        self._sources = []

    @property
    def shared_bytes(self) -> int:
        """Bytes in shared memory: of the chunks that are read ahead, and of the queues."""
        parts = leaves(self.data.first)
        sample = sum(tensor.nbytes for _, tensor in parts)
        batches = (PREFETCHED + 2) * self.local_batch_size * sample
        return (batches + self._processes * QUEUES) if self._processes else 0

    def stream_position(self, ranks: Ranks) -> dict[str, Any]:
        states = {str(reader): [*position] for reader, position in self.positions.items()}
        merged = ranks.gather_and_decide("readers", states, merge)
        return {"readers": self.data.readers, "states": dict(merged)}

    def begin_at(self, stream: Mapping[str, Any]) -> None:
        states = stream.get("states", {})
        self.positions = {int(reader): Position(*position) for reader, position in states.items()}

    def prefetch_epoch(self) -> None:
        """Do nothing: a stream has one epoch."""

    def _draw(self, epoch: int) -> tuple[torch.Tensor, None]:
        return torch.empty(0, dtype=torch.int64), None

    def first(self, number: int, spread: bool = False) -> Batch:
        """Return the first samples of this rank, as `Loader.first`; a stream has none to spread."""
        chunks = self._chunks(0, 1, number, {})
        chunk = next(iter(chunks))
        inputs, targets = to((chunk.inputs, chunk.targets), self.device)
        return Batch(*self._as_arguments(inputs, targets), number * self.options.dp_size)

    def _chunks(
        self, first: int, step: int, size: int, positions: Mapping[int, Position]
    ) -> Chunks:
        """Return chunks of the samples first, first + step, ... of this rank."""
        rank = self.options.dp_rank
        ranks = self.options.dp_size
        return Chunks(
            stream=self._stream,
            first=rank + ranks * first,
            step=ranks * step,
            size=size,
            positions=positions,
            labels=self.options.labels,
        )

    def _start(self, order: torch.Tensor) -> None:
        if self._is_closed:
            raise ConfigError(CLOSED)
        self._end()
        sources = max(1, self._processes)
        size = self.local_batch_size // sources
        chunks: Iterable[Chunks] = (
            self._chunks(self.start + place, sources, size, self.positions)
            for place in range(sources)
        )
        pin_memory = self.device.type == "cuda"
        self._sources = [
            ReaderProcess(each, pin_memory) if self._processes else iter(each) for each in chunks
        ]

    def _read(self, places: torch.Tensor) -> Trees:
        if not self._sources:
            raise ConfigError(CLOSED)
        chunks = [next(source) for source in self._sources]
        for chunk in chunks:
            self.positions |= chunk.positions
            if self.options.labels is not None:
                self.options.labels.add(*chunk.label_range)
        self._note(next((chunk.problem for chunk in chunks if chunk.problem), ""))
        batch = interleave([(chunk.inputs, chunk.targets) for chunk in chunks])
        inputs, targets = to(batch, self.device)
        return inputs, targets

    def _note(self, problem: str) -> None:
        """Log once why a resume reads the samples before again."""
        if problem and not self._problem:
            self._problem = problem
            log.info(
                f"{self._stream.reading.name}: a resume reads the samples before again, and skips "
                f"them: {problem}"
            )


def number_of_processes(most: int, divided: int) -> int:
    """Return the largest number of processes that divides the readers and the local batch.

    Args:
        most: of a rank; 0: it reads itself.
        divided: greatest common divisor of the readers and the samples of a local batch.
    """
    return max((number for number in range(1, most + 1) if divided % number == 0), default=0)


def interleave(batches: list[Trees]) -> Trees:
    """Return the batch with the first samples of all batches, then the second ones, and so on.

    Raises:
        SampleError: the samples have different shapes.
    """
    if len(batches) == 1:
        return batches[0]
    forms = [form_of(batch) for batch in batches]
    if other := [form for form in forms if form != forms[0]]:
        raise SampleError(
            f"two samples in one batch have the shapes {[shape for _, shape, _ in forms[0]]} and "
            f"{[shape for _, shape, _ in other[0]]}. Return samples of one shape, or pad them in "
            "collate_fn"
        )
    together = stack(batches, partial(torch.stack, dim=1))
    return apply(lambda tensor: tensor.flatten(0, 1), together)
