"""Random numbers by index: the seed of whatever is drawn follows from what it is drawn for.

It depends neither on the rank that draws, nor on what was drawn before, nor on where the run was
resumed.
"""

import hashlib
import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch


def seed_of(purpose: str, bits: int = 32, **place: int) -> int:
    """Return the seed of a generator: the first bits of the SHA-256 of `augment seed=0 epoch=3`.

    torch's CPU generator uses only the lowest 32 bits of its seed. Sums such as seed + epoch
    already seed other generators.

    Args:
        purpose: what is drawn, for example `augment`.
        bits: of the seed.
        place: the run's seed, and what else the numbers depend on, such as epoch and index.
    """
    key = " ".join([purpose, *[f"{name}={number}" for name, number in place.items()]])
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[: bits // 8], "big")


@contextmanager
def seeded(purpose: str, **place: int) -> Generator[None]:
    """Seed the global generators of torch, NumPy and Python in the body.

    Datasets draw from them. The seed is that of `seed_of`, and their states are restored.
    """
    seed = seed_of(purpose, **place)
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would take 100 us, not 2: it also seeds all devices
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
