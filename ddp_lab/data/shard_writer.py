"""Shards of tokens from text files (shards.py has their format): `ddp-lab shards`."""

import codecs
import importlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.data.datasets import BYTES
from ddp_lab.data.shards import HEADER, HEADER_BYTES, HEADER_SIZE, MAGIC, TOKEN, VERSION

PIECE = 2**18  # bytes of a text that are encoded at once, up to the next line break
AT_ONCE = 64  # pieces that a tokenizer gets together, because it encodes them in parallel
LARGEST_VOCABULARY = 2 ** (8 * TOKEN.itemsize)


class Encoder(Protocol):
    """What makes tokens of text.

    Attributes:
        vocabulary: number of different tokens.
    """

    vocabulary: int

    def encode(self, pieces: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yield the tokens of a text, which is given in pieces: arrays of integers."""
        ...


class ByteEncoder:
    """Bytes as tokens."""

    vocabulary = BYTES

    def encode(self, pieces: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yield the bytes as they are; nothing separates the texts."""
        for piece in pieces:
            yield np.frombuffer(piece, np.uint8)


class TokenizerEncoder:
    """The tokens of a tokenizer of transformers.

    Each text begins with the tokenizer's end-of-text token, if it has one, as in the public shards
    of GPT-2.

    Args:
        folder: directory of the tokenizer.

    Raises:
        ConfigError: transformers is missing, the tokenizer cannot be loaded, or its vocabulary does
            not fit into uint16.
    """

    def __init__(self, folder: Path):
        about = f"--tokenizer {folder}"
        if not folder.is_dir():  # transformers would look for it on the Hub
            raise ConfigError(
                f"{about}: is not a directory on this machine. Download the tokenizer, and use its "
                "directory, with tokenizer.json or the like"
            )
        try:
            transformers = importlib.import_module("transformers")
        except ModuleNotFoundError:
            raise ConfigError(
                f"{about}: needs the package transformers. Use pip install 'ddp_lab[hf]', or "
                "--bytes"
            ) from None
        try:
            tokenizers = transformers.AutoTokenizer
            self.tokenizer: Any = tokenizers.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # of transformers or tokenizers, which raise any type
            raise ConfigError(f"{about}: cannot be loaded: {describe_error(error)}") from None
        self.vocabulary = len(self.tokenizer)
        if self.vocabulary > LARGEST_VOCABULARY:
            raise ConfigError(
                f"{about}: has {self.vocabulary:,} tokens, but those of shards are uint16, of "
                f"which there are {LARGEST_VOCABULARY:,}. Use a tokenizer with a smaller vocabulary"
            )

    def encode(self, pieces: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yield the tokens of a text in UTF-8.

        Raises:
            UnicodeDecodeError: it is not UTF-8.
        """
        end = self.tokenizer.eos_token_id
        if end is not None:
            yield np.array([end])
        texts = decoded(pieces)
        while batch := list(islice(texts, AT_ONCE)):
            encoded = self.tokenizer(batch, add_special_tokens=False, verbose=False)
            for numbers in encoded["input_ids"]:
                yield np.array(numbers, np.int64)


def decoded(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield pieces of UTF-8 as text; a character may be in two of them."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for piece in pieces:
        if text := decoder.decode(piece):
            yield text
    decoder.decode(b"", final=True)


def pieces_of(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` to before `end`, in pieces that end with lines.

    A line that is much longer than PIECE is in several pieces.
    """
    with path.open("rb") as file:
        file.seek(start)
        left = end - start
        while left > 0:
            piece = file.read(min(PIECE, left))
            if not piece:  # somebody else has shortened the file
                return
            if len(piece) < left and not piece.endswith(b"\n"):
                piece += file.readline(min(PIECE, left - len(piece)))
            left -= len(piece)
            yield piece


def held_out_from(path: Path, fraction: float) -> int:
    """Return the number of the byte at which the held-out end of a text file begins.

    It is the beginning of a line or, where none follows, of a character.

    Args:
        path: the file.
        fraction: of its bytes.
    """
    size = path.stat().st_size
    position = size - round(fraction * size)
    if position in (0, size):
        return position
    with path.open("rb") as file:
        file.seek(position - 1)
        rest = file.readline(PIECE)
        line = position - 1 + len(rest)
        if rest.endswith(b"\n") and line < size:
            return line
        file.seek(position)
        following = file.read(4)
    # the second and later bytes of a character are 10xxxxxx
    inside = [byte & 0b11000000 == 0b10000000 for byte in following]
    return position + (inside.index(False) if False in inside else 0)


@dataclass
class ShardWriter:
    """Writes tokens to shards, which follow each other in order of their names.

    Attributes:
        folder: of the shards.
        name: begins the names of the files: train or val.
        largest: tokens of a shard, of which the last one may have fewer.
        tokens: number of tokens so far.
        paths: the files so far.
    """

    folder: Path
    name: str
    largest: int
    tokens: int = 0
    paths: list[Path] = field(default_factory=list[Path])

    def add(self, tokens: np.ndarray) -> None:
        """Write tokens, [n], after those so far."""
        while len(tokens):
            used = self.tokens - self.largest * max(0, len(self.paths) - 1)
            if not self.paths or used == self.largest:
                self._begin()
                used = 0
            part = tokens[: self.largest - used]
            with self.paths[-1].open("ab") as file:
                file.write(part.astype(TOKEN).tobytes())
            self.tokens += len(part)
            tokens = tokens[len(part) :]

    def _begin(self) -> None:
        """Begin the next shard, with room for its header."""
        path = self.folder / f"{self.name}_{len(self.paths):06}.bin"
        path.write_bytes(bytes(HEADER_BYTES))
        self.paths.append(path)

    def close(self) -> None:
        """Write the headers, which have the numbers of tokens."""
        for path in self.paths:
            header = np.zeros(HEADER_SIZE, HEADER)
            tokens = (path.stat().st_size - HEADER_BYTES) // TOKEN.itemsize
            header[:3] = MAGIC, VERSION, tokens
            with path.open("r+b") as file:
                file.write(header.tobytes())


def write_shards(
    files: Sequence[Path], folder: Path, encoder: Encoder, val_fraction: float, largest: int
) -> tuple[ShardWriter, ShardWriter]:
    """Write the shards of text files, or nothing if that fails.

    Args:
        files: in order.
        folder: of the shards, which is made if it is missing.
        encoder: makes the tokens.
        val_fraction: of each file, its end is held out for validation.
        largest: tokens of a shard.

    Returns:
        What has written the shards train_*.bin, and val_*.bin.

    Raises:
        ConfigError: a file cannot be read or is not UTF-8, the folder cannot be written to or has
            shards already, or a set would be empty.
    """
    require_no_shards(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # renamed at the end: a part of the shards would look like all of them
        with tempfile.TemporaryDirectory(dir=folder, prefix=".shards-") as temporary:
            writers = [ShardWriter(Path(temporary), name, largest) for name in ("train", "val")]
            for path in files:
                add_file(path, writers, encoder, val_fraction)
            require_tokens(writers, val_fraction)
            for writer in writers:
                writer.close()
                for path in writer.paths:
                    path.rename(folder / path.name)
    except OSError as error:
        raise ConfigError(
            f"--output {folder}: cannot be written ({error.strerror or error})"
        ) from None
    return writers[0], writers[1]


def add_file(
    path: Path, writers: Sequence[ShardWriter], encoder: Encoder, val_fraction: float
) -> None:
    """Write the tokens of a file: its beginning by the first writer, its end by the second.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        cut = held_out_from(path, val_fraction)
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        for writer, start, end in zip(writers, (0, cut), (cut, size), strict=True):
            for tokens in encoder.encode(pieces_of(path, start, end)) if start < end else ():
                writer.add(tokens)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: is not text in UTF-8 ({error.reason}). Convert it, or use --bytes"
        ) from None


def require_no_shards(folder: Path) -> None:
    """Raise a ConfigError if a folder has shards already, which would be mixed with new ones."""
    for path in sorted([*folder.glob("train_*.bin"), *folder.glob("val_*.bin")]):
        raise ConfigError(
            f"--output {folder}: has shards already, such as {path.name}. Remove them, or use "
            "another directory"
        )


def require_tokens(writers: Sequence[ShardWriter], val_fraction: float) -> None:
    """Raise a ConfigError if a set that is asked for has no tokens."""
    training, validation = writers
    if not training.tokens:
        raise ConfigError(
            f"--val-fraction {val_fraction:g}: leaves nothing to train on. Use longer files, or a "
            "smaller fraction"
        )
    if val_fraction and not validation.tokens:
        raise ConfigError(
            f"--val-fraction {val_fraction:g}: holds out nothing of these files. Use a larger "
            "fraction, or 0 for no validation set"
        )
