"""Let the tests train on 480 of the 1,797 digits, because an epoch of all takes a second of a core.

What needs all of them has ALL_DIGITS in its environment. Cold launches have all of them, too.
"""

import os

from ddp_lab.data.dataset import Dataset, InMemory
from ddp_lab.data.datasets import Digits

ALL_DIGITS = "DDP_LAB_TESTS_ALL_DIGITS"
ALL = Digits.sizes
FEW = (384, 96)  # of which an epoch has six batches of 64
load_all = Digits.load


def sizes(digits: Digits) -> tuple[int, int]:
    """Return the numbers of samples of the training and of the test set."""
    return ALL if ALL_DIGITS in os.environ else FEW


def load(digits: Digits) -> Dataset:
    """Return the first samples of each set."""
    Digits.sizes = ALL
    try:
        dataset = load_all(digits)
    finally:
        Digits.sizes = property(sizes)
    parts = [
        InMemory(part.inputs[:size], part.targets[:size])
        for part, size in zip((dataset.train, dataset.test), digits.sizes, strict=True)
    ]
    return Dataset(*parts, dataset.classes)


def use_few_digits() -> None:
    """Let this process and its forks use few digits."""
    Digits.sizes = property(sizes)
    Digits.load = load
