"""Trials of a loss with a few samples, in which `ddp_lab.gather` finds no other ranks."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Trial:
    """A call of a loss whose batch is not divided.

    Attributes:
        gathers: whether the loss has called `gather`.
    """

    gathers: bool = False


@dataclass
class Calls:
    """What the calls of `gather` and `own_rows` have to know of each other.

    Attributes:
        rows: number of rows that `gather` got last, with which `own_rows` must agree.
        device: that they were on.
        trial: the trial that is under way; None: there is none.
    """

    rows: int = 0
    device: torch.device | None = None
    trial: Trial | None = field(default=None)


CALLS = Calls()


@contextmanager
def trial_of_loss() -> Generator[Trial]:
    """Let `gather` return its argument in the body, a trial of a loss with some samples."""
    before = CALLS.trial
    CALLS.trial = Trial()
    try:
        yield CALLS.trial
    finally:
        CALLS.trial = before
