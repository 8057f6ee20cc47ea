"""`data=tokens`: the tokens of a text in files of the public format of GPT-2 (llm.c, FineWeb).

A file, a shard, has 256 int32 numbers of header, of which the first three are MAGIC, VERSION and
the number of its tokens, and then these tokens as uint16; all little-endian.

    shard 0: [ window 0 | window 1 | ... | rest ]   shard 1: [ window n | window n + 1 | ... ]

A sample is a window: `context` tokens, and those that follow each as targets. Windows are numbered
through all shards, in the order of the files' names, and none crosses the end of a shard. So the
order of the samples is a permutation of numbers, as that of images. Shards are mapped into memory:
a start reads no more of each than its header and what `fingerprint` hashes.
"""

import bisect
import glob
import hashlib
import mmap
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch

from ddp_lab.config.errors import ConfigError, NodeError, count
from ddp_lab.config.types import Count
from ddp_lab.data.dataset import Dataset, InMemory, Samples

MAGIC = 20240520
VERSION = 1
HEADER = np.dtype("<i4")
HEADER_SIZE = 256  # numbers
HEADER_BYTES = HEADER_SIZE * HEADER.itemsize
TOKEN = np.dtype("<u2")
HASHED = 2**20  # bytes at the beginning and at the end of a shard by which it is identified
# of this process: each map has a file descriptor, of which 1,024 are allowed by default
MAPPED = 256


@dataclass(frozen=True)
class Shard:
    """A file of tokens.

    Attributes:
        path: the file.
        tokens: number of its tokens, as its header says.
    """

    path: str
    tokens: int

    def windows(self, context: int) -> int:
        """Return the number of windows of `context` tokens and the one that follows them."""
        return max(0, self.tokens - 1) // context

    def read(self, start: int, end: int) -> np.ndarray:
        """Return the tokens from `start` to before `end`: a part of the mapped file, uint16."""
        return mapped(self.path, self.tokens)[start:end]

    def fingerprint(self) -> str:
        """Return what identifies the file without reading all of it.

        It is the hash of the file's name without its folder, its size, its header, and its first
        and last HASHED bytes. A change elsewhere that keeps the size is not noticed.
        """
        path = Path(self.path)
        size = path.stat().st_size
        digest = hashlib.sha256(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(HASHED))  # with the header
            file.seek(max(0, size - HASHED))
            digest.update(file.read(HASHED))
        return digest.hexdigest()


@lru_cache(MAPPED)
def mapped(path: str, tokens: int) -> np.ndarray:
    """Return the tokens of a shard, uint16 [tokens], of which those are read that are used.

    The map is advised of random access: the system would otherwise read ahead 128 KiB for each
    window.
    """
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        content.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(content, TOKEN, tokens, HEADER_BYTES)


@dataclass(frozen=True)
class Windows(Samples):
    """Windows of shards, which are read when they are needed.

    Attributes:
        shards: in order.
        context: tokens of a window.
        vocabulary: the tokens are numbers below it.
        numbers: int64 [N], the windows that are samples, in order; None: all of them.
        key: that chose the shards, which begins messages.
    """

    shards: Sequence[Shard]
    context: int
    vocabulary: int
    numbers: torch.Tensor | None = None
    key: str = "data.root"

    @cached_property
    def ends(self) -> list[int]:
        """The number of windows up to the end of each shard."""
        counts = [shard.windows(self.context) for shard in self.shards]
        return np.cumsum(counts).tolist()

    @property
    def size(self) -> int:
        return self.ends[-1] if self.numbers is None else len(self.numbers)

    @cached_property
    def first(self) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.sample(0, 0)

    def number(self, index: int) -> int:
        return index if self.numbers is None else int(self.numbers[index])

    def sample(self, epoch: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of a window and those that follow each: int64 [context].

        Raises:
            ConfigError: one of them is not below `vocabulary`.
        """
        tokens = torch.from_numpy(self.window(self.number(index)).astype(np.int64))
        return tokens[:-1], tokens[1:]

    def window(self, number: int) -> np.ndarray:
        """Return the tokens of a window and the one after it: uint16 [context + 1].

        Raises:
            ConfigError: as `sample`.
        """
        place = bisect.bisect_right(self.ends, number)
        shard = self.shards[place]
        start = (number - (self.ends[place - 1] if place else 0)) * self.context
        tokens = shard.read(start, start + self.context + 1)
        largest = int(tokens.max())
        if largest >= self.vocabulary:
            position = start + int(tokens.argmax())
            raise ConfigError(
                f"data.num_classes={self.vocabulary}: token {position:,} of {shard.path} is "
                f"{largest}; tokens must be 0 to {self.vocabulary - 1}. Use the size of the "
                "vocabulary of the shards' tokenizer, or a multiple of 64 above it"
            )
        return tokens

    def subset(self, indices: torch.Tensor, augment: bool) -> "Windows":
        numbers = indices if self.numbers is None else self.numbers[indices]
        return replace(self, numbers=numbers)

    def in_memory(self) -> InMemory:
        """Return all windows as tensors of uint16 [N, context], which share their tokens.

        Raises:
            ConfigError: as `sample`.
        """
        tokens = np.empty((self.size, self.context + 1), np.uint16)
        for index in range(self.size):
            tokens[index] = self.window(self.number(index))
        inputs = torch.from_numpy(tokens)
        return InMemory(inputs[:, :-1], inputs[:, 1:])


class TokenShards:
    """Shards of tokens: files of the public format of GPT-2.

    Sample i has the tokens of window i, as in the docstring of the file.

    Args:
        root: pattern of the training set's files, for example 'DIR/train_*.bin'; or one file.
        val_root: pattern of the validation set's files; null: there are none.
        context: tokens of a sample.
        num_classes: size of the vocabulary.
    """

    def __init__(self, root: str, val_root: str | None, context: Count, num_classes: Count):
        self.patterns = {"train": root, "val": val_root}
        self.context = context
        self.num_classes = num_classes

    def load(self) -> Dataset:
        """Open the shards, read their headers and the first window of each set.

        Raises:
            NodeError: no file matches, a file is no shard, or is shorter than its header says.
            ConfigError: a set has no window, a token is not in the vocabulary, or a file is in both
                sets.
        """
        patterns = {name: pattern for name, pattern in self.patterns.items() if pattern is not None}
        sets = {name: self._open(name, pattern) for name, pattern in patterns.items()}
        self._require_disjoint(sets)
        files: dict[str, str] = {}
        for name, windows in sets.items():
            _ = windows.first
            files |= {
                f"{name}: {Path(shard.path).name}": shard.fingerprint() for shard in windows.shards
            }
        facts = repr((self.context, self.num_classes, [*files.items()]))
        digest = hashlib.sha256(facts.encode()).hexdigest()
        classes = [str(token) for token in range(self.num_classes)]
        return Dataset(sets["train"], None, classes, sets.get("val"), digest=digest, files=files)

    def _open(self, name: str, pattern: str) -> Windows:
        """Return the windows of a set, train or val."""
        key = f"data.{'root' if name == 'train' else 'val_root'}={pattern}"
        paths = find_shards(pattern, key)
        shards = [open_shard(path, key) for path in paths]
        windows = Windows(shards, self.context, self.num_classes, key=key)
        if not windows.size:
            longest = max(shard.tokens for shard in shards)
            raise ConfigError(
                f"data.context={self.context}: a window needs {self.context + 1:,} tokens, but the "
                f"longest shard of {key} has {longest:,}. Use a smaller context or longer shards"
            )
        return windows

    def _require_disjoint(self, sets: dict[str, Windows]) -> None:
        """Raise a ConfigError if a file is in the training and in the validation set."""
        if "val" not in sets:
            return
        trained = {Path(shard.path).resolve() for shard in sets["train"].shards}
        for shard in sets["val"].shards:
            if Path(shard.path).resolve() in trained:
                raise ConfigError(
                    f"{sets['val'].key}: {shard.path} is also a file of {sets['train'].key}, and "
                    "nothing may be validated that is trained on. Use patterns without a file in "
                    "common"
                )


def find_shards(pattern: str, key: str) -> list[str]:
    """Return the files that a pattern stands for, in order of their paths.

    Raises:
        NodeError: there are none.
    """
    paths = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
    files = [path for path in paths if Path(path).is_file()]
    if not files:
        raise NodeError(
            f"{key}: matches no file on {socket.gethostname()}. Use the pattern of token shards, "
            "for example 'DIR/train_*.bin', which `ddp-lab shards` writes"
        )
    return files


def open_shard(path: str, key: str) -> Shard:
    """Read the header of a shard.

    Args:
        path: the file.
        key: that chose it, which begins messages.

    Raises:
        NodeError: it is no shard, or has another length than its header says.
    """
    try:
        header = np.fromfile(path, HEADER, HEADER_SIZE)
        size = Path(path).stat().st_size
    except OSError as error:
        raise NodeError(
            f"{key}: {path} cannot be read on {socket.gethostname()} ({error.strerror})"
        ) from None

    if len(header) < HEADER_SIZE or header[0] != MAGIC:
        if len(header) == HEADER_SIZE:
            begins = f"begins with {header[0]}"
        else:
            begins = f"has {count(size, 'byte')}" if size else "is empty"
        raise NodeError(
            f"{key}: {path} is no shard of tokens: it {begins}, but a shard begins with a header "
            f"of {HEADER_BYTES:,} bytes, whose first number is {MAGIC}. `ddp-lab shards` writes "
            "shards from text"
        )
    version = int(header[1])
    tokens = int(header[2])
    if version != VERSION:
        raise NodeError(
            f"{key}: {path} has version {version} of the format of token shards; supported is "
            f"{VERSION}, whose tokens are uint16. Write it again with `ddp-lab shards`"
        )
    expected = HEADER_BYTES + TOKEN.itemsize * tokens
    if tokens < 0 or size != expected:
        wide = HEADER_BYTES + 2 * TOKEN.itemsize * tokens
        of_wide = ", as tokens of four bytes have, which are not supported" if size == wide else ""
        raise NodeError(
            f"{key}: {path} has {size:,} bytes{of_wide}, but its header says "
            f"{count(tokens, 'token')}, for which it must have {expected:,}. Copy or write the "
            "file again"
        )
    return Shard(path, tokens)
