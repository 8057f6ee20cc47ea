"""A stream: an IterableDataset as training set. Its order is that in which k readers yield samples.

Reader j has part j of the stream, the only one with data.readers=1, and begins it again at its end.
Sample i of the training is from reader i % k, whose sample number i // k it is. It belongs to the
global batch i // B, and replica r of R takes the rows r, r + R, ... of it, as of any dataset:

    k = 2, R = 2, B = 4     global batch 0      global batch 1
    reader 0                0     2             4     6           replica 0 reads reader 0
    reader 1                   1     3             5     7        replica 1 reads reader 1

So the order depends on k alone, and not on the number of ranks, their strategy or their processes.

**Who reads.** Every replica reads by itself and nothing is sent, so that a rank waits for no other
one. It needs only readers j with j % g == r % g, where g is the greatest common divisor of k and R:
if k is a multiple of R, exactly the samples that it trains on. With one reader every replica reads
the complete stream and keeps one sample of R, which costs R times the reading. The ranks of one
replica (pipeline, tp) read the same samples.

What a dataset draws from the global generators is seeded for each sample, by its reader and number.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from PIL import Image

from ddp_lab.config.errors import ConfigError, SampleError, count, describe_error
from ddp_lab.config.types import ENDLESS
from ddp_lab.data.collated import collate
from ddp_lab.data.dataset import Samples
from ddp_lab.data.seeds import seeded
from ddp_lab.data.sources import Reading, parts_of
from ddp_lab.data.trees import Tree, leaves, rows, stack

STATE_SECONDS = 1.0  # between two states that a reader keeps: a resume reads less than this again
LISTED = 1_000_000  # the most samples of a stream that evaluates, which is kept in memory


class Position(NamedTuple):
    """Where a reader is.

    Attributes:
        number: of its next sample, from 0.
        passes: how often it has begun again.
        in_pass: samples since it has.
        state: of its dataset, encoded; "": not known, so that the samples before are read again.
    """

    number: int = 0
    passes: int = 0
    in_pass: int = 0
    state: str = ""


@dataclass(frozen=True)
class Stream(Samples):
    """The samples of a stream.

    Attributes:
        make: constructs the dataset. Each reader has its own, so that none is left in a state in
            which another reader or process begins.
        reading: how samples are read.
        readers: number of parts of the stream, each of which a reader reads.
        state_seconds: about every how many seconds a reader keeps the state of its dataset.
    """

    make: Callable[[], Any]
    reading: Reading
    readers: int = 1
    state_seconds: float = field(default_factory=lambda: STATE_SECONDS)
    _first_items: list[Any] = field(default_factory=list[Any], repr=False, compare=False)

    @property
    def size(self) -> int:
        return ENDLESS

    @property
    def has_fixed_shapes(self) -> bool:
        return self.reading.collate_fn is None

    @cached_property
    def first(self) -> tuple[Tree, Tree]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.sample(0, 0)

    def sample(self, epoch: int, index: int) -> tuple[Tree, Tree]:
        """Return one of the first samples of reader 0, which are read from its beginning."""
        return rows(self.batch(epoch, [index]), torch.tensor(0))

    def batch(self, epoch: int, indices: Sequence[int]) -> tuple[Tree, Tree]:
        """Return the batch of some of the first samples of reader 0."""
        items = self._first_items
        if max(indices) >= len(items):
            reader = Reader(self, 0)
            try:
                items[:] = [reader.take(number) for number in range(max(indices) + 1)]
            except SampleError as error:  # every rank has it
                raise ConfigError(str(error)) from None
            finally:
                reader.close()
        return self.collate([items[index] for index in indices], indices[0])

    def subset(self, indices: torch.Tensor, augment: bool) -> "Stream":
        raise ConfigError(f"{self.reading.name}: a stream has no samples by number")

    def check(self, dataset: Any) -> None:
        """Check that a dataset can be read as a stream, and read its first sample.

        Args:
            dataset: from `make`.

        Raises:
            ConfigError: it cannot.
        """
        name = self.reading.name
        if self.reading.collate_fn is not None and self._augments:
            raise ConfigError(
                f"{name}: data.crop_scale, data.randaugment and data.erasing change single images "
                "of Pillow, and not the batches of data.collate_fn. Use null, null and 0, and "
                "augment in the dataset"
            )
        if iter(dataset) is iter(dataset):
            raise ConfigError(
                f"{name}: iter() returns the same iterator twice, so the stream cannot begin "
                "again at its end or at a resume. Let __iter__ return a new one, for example as a "
                "generator"
            )
        if self.readers > 1:
            self._check_parts(dataset)
        _ = self.first

    @property
    def _augments(self) -> bool:
        images = self.reading.images
        return images is not None and images.augments

    def _check_parts(self, dataset: Any) -> None:
        """Check that a dataset can be divided among the readers."""
        key = f"data.readers={self.readers}"
        name = self.reading.name
        if not callable(getattr(dataset, "shard", None)):
            raise ConfigError(
                f"{key}: {name} has no method shard(num, index), which returns part `index` of "
                "`num`. Add it, or use data.readers=1, with which every replica reads the stream"
            )
        parts = getattr(dataset, "num_shards", None)  # of datasets
        if isinstance(parts, int) and parts < self.readers:
            raise ConfigError(
                f"{key}: {name} has {count(parts, 'shard')}, and a reader needs at least one. "
                f"Use at most data.readers={parts}, or write more shards"
            )

    def open(self, reader: int) -> Any:
        """Construct the dataset of a reader.

        Raises:
            ConfigError: it cannot be constructed or divided.
        """
        with seeded("stream", seed=self.reading.seed, reader=reader):
            dataset = self.make()
            if self.readers == 1:
                return dataset
            try:
                part = dataset.shard(self.readers, reader)
            except Exception as error:
                raise ConfigError(
                    f"data.readers={self.readers}: {self.reading.name}: "
                    f"shard({self.readers}, {reader}) failed: {describe_error(error)}"
                ) from None
        if not hasattr(part, "__iter__"):
            raise ConfigError(
                f"data.readers={self.readers}: {self.reading.name}: shard({self.readers}, "
                f"{reader}) must return an iterable dataset, got {type(part).__name__}"
            )
        return part

    def convert(self, item: Any, number: int) -> Any:
        """Return what a dataset has yielded as `collate` takes it.

        Args:
            item: of the dataset.
            number: of the sample, for messages.

        Raises:
            ConfigError: it is no sample.
        """
        reading = self.reading
        if reading.collate_fn is not None:
            return item
        inputs, target = parts_of(item, reading, number)
        if isinstance(inputs, Image.Image):
            assert reading.images is not None, "`parts_of` refuses such images"
            inputs = reading.images.view(True)(inputs)
        return inputs, target

    def collate(
        self,
        items: list[Any],
        number: int,
        stack_tensors: Callable[[list[torch.Tensor]], torch.Tensor] = torch.stack,
    ) -> tuple[Tree, Tree]:
        """Return the batch of some samples.

        Args:
            items: from `convert`.
            number: of the first of them in the training, by which collate_fn is seeded.
            stack_tensors: as in `trees.stack`.
        """
        reading = self.reading
        if reading.collate_fn is None:
            return stack(items, stack_tensors)
        with seeded("collate", seed=reading.seed, index=number):
            return collate(items, reading.collate_fn, reading.targets, reading.name, reading.key)


class Reader:
    """Reads a part of a stream in order, and begins it again at its end.

    Args:
        stream: of all readers.
        index: of this one.
        position: where to begin.

    Attributes:
        position: before the next sample, without the state of the dataset.
        dataset: of this reader.
    """

    def __init__(self, stream: Stream, index: int, position: Position | None = None):
        self.stream = stream
        self.index = index
        self.dataset = stream.open(index)
        self.position = Position()
        self._iterator: Iterator[Any] | None = None
        if position is not None and position.state:
            from ddp_lab.data.stream_state import decode

            self.position = position._replace(state="")
            self._set_epoch()
            self.dataset.load_state_dict(decode(position.state))
        else:
            self._set_epoch()

    def take(self, number: int) -> Any:
        """Return the sample of a number, as `Stream.convert` does; those before are skipped.

        Raises:
            SampleError: the dataset cannot return it, or has no samples.
        """
        while self.position.number < number:
            self.draw(convert=False)
        return self.draw()

    def draw(self, convert: bool = True) -> Any:
        """Return the next sample, or None if it is not converted.

        Raises:
            SampleError: as `take`.
        """
        number = self.position.number
        seed = self.stream.reading.seed
        try:
            with seeded("sample", seed=seed, reader=self.index, number=number):
                item = self._next()
                sample = self.stream.convert(item, number) if convert else None
        except ConfigError as error:
            raise SampleError(str(error)) from None
        self.position = self.position._replace(number=number + 1, in_pass=self.position.in_pass + 1)
        return sample

    def close(self) -> None:
        """End the iteration, so that the dataset can close its files."""
        self._iterator = None

    def _set_epoch(self) -> None:
        """Let a dataset that orders each pass anew know which one it is."""
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(self.position.passes)

    def _next(self) -> Any:
        """Return what the dataset yields next; at its end it begins again."""
        reading = self.stream.reading
        while True:
            try:
                if self._iterator is None:
                    self._iterator = iter(self.dataset)
                return next(self._iterator)
            except StopIteration:
                self._begin_again()
            except (MemoryError, SampleError, ConfigError):
                raise
            except Exception as error:
                raise ConfigError(
                    f"{reading.name}: sample {self.position.number}{self._of_reader()} cannot be "
                    f"read: {describe_error(error)}"
                ) from None

    def _begin_again(self) -> None:
        if not self.position.in_pass:
            raise ConfigError(
                f"{self.stream.reading.name}: pass {self.position.passes + 1}"
                f"{self._of_reader()} has no samples; each must have at least one. A dataset with "
                "state_dict must begin again when its iteration has ended"
            )
        self._iterator = None
        self.position = self.position._replace(passes=self.position.passes + 1, in_pass=0)
        self._set_epoch()

    def _of_reader(self) -> str:
        readers = self.stream.readers
        return f" of reader {self.index} of {readers}" if readers > 1 else ""


def fingerprint(sample: tuple[Tree, Tree]) -> str:
    """Return a hash of a sample."""
    digest = hashlib.sha256()
    for name, tensor in leaves(sample):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def require_same_stream(values: list[tuple[str, dict[str, int]]]) -> None:
    """Check that all ranks read the same stream.

    Args:
        values: as in `require_same_data`.

    Raises:
        ConfigError: the digests differ, so that the first samples do, or the sizes of other sets.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ConfigError(
                f"the dataset: the first sample of the stream, or the size of another set, is not "
                f"the same on rank {rank} as on rank 0. A stream must yield the same samples on "
                "every rank, which keeps its own ones: do not divide it by RANK or get_rank(), and "
                "seed what it draws from generators of its own"
            )


def read_all(dataset: Any, reading: Reading, name: str) -> list[Any]:
    """Return all samples of a stream that evaluates, in which each counts once.

    Args:
        dataset: the stream, which must end.
        reading: how it is read.
        name: of the set, val or test.

    Raises:
        ConfigError: it cannot be read, or has more than LISTED samples.
    """
    items: list[Any] = []
    iterator = iter(dataset)
    try:
        for number in range(LISTED + 1):
            with seeded("sample", seed=reading.seed, number=number):
                items += islice(iterator, 1)
            if len(items) <= number:
                return items
    except MemoryError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{reading.name}: sample {len(items)} of the {name} set cannot be read: "
            f"{describe_error(error)}"
        ) from None
    raise ConfigError(
        f"{reading.name}: the {name} set is a stream of more than {LISTED:,} samples. It is read "
        "once and kept in memory, to count each sample once: end it earlier, for example by "
        f"itertools.islice, use a map-style dataset, or data.{name}_split=null"
    )


def copies_of(dataset: Any, name: str) -> Callable[[], Any]:
    """Return what makes a dataset that is an object of the user anew: a copy, not yet iterated.

    Args:
        dataset: of the user.
        name: begins the message.

    Raises:
        ConfigError: it cannot be copied.
    """
    try:
        copy.deepcopy(dataset)
    except Exception as error:
        raise ConfigError(
            f"{name}: every reader of a stream gets a copy of it, but it cannot be copied: "
            f"{describe_error(error)}. Open files and connections in __iter__"
        ) from None
    return partial(copy.deepcopy, dataset)
