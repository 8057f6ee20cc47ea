"""Shards of tokens, as other programs write them."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np


def write_shard(
    path: Path,
    tokens: Iterable[int],
    magic: int = 20240520,
    version: int = 1,
    length: int | None = None,
) -> Path:
    """Write a shard, with another header if one is given, and return its path."""
    values = np.array([*tokens], "<u2")
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(values) if length is None else length
    path.write_bytes(header.tobytes() + values.tobytes())
    return path


def write_shards(folder: Path, *lengths: int, name: str = "train", tokens: int = 97) -> str:
    """Write shards of a text that repeats itself with errors; return the pattern of their names."""
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(sum(lengths))
    for number, length in enumerate(lengths):
        text = np.arange(length) * 7 % tokens
        noisy = generator.random(length) < 0.1
        text[noisy] = generator.integers(0, tokens, noisy.sum())
        write_shard(folder / f"{name}_{number:06}.bin", text)
    return str(folder / f"{name}_*.bin")
