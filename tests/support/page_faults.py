"""A count of page faults while tensors are allocated and freed, also as a task of a run."""

import resource
from pathlib import Path

import torch

from ddp_lab.tasks import Classification

TENSORS = 10  # of a round
PAGES = 1024  # pages of 4 KiB in each tensor
ROUNDS = 10


def count_faults() -> int:
    """Return the page faults of rounds that allocate tensors and free them in reverse order."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(ROUNDS):
        activations = [torch.ones(PAGES * 1024) for _ in range(TENSORS)]
        while activations:
            activations.pop()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


class CountsFaults(Classification):
    """Classification that writes the page faults of the second count when the last epoch begins.

    Args:
        out: file of the number.
        loss: as of Classification.
    """

    def __init__(self, out: str, loss=None):
        super().__init__(loss)
        self.out = Path(out)

    def train(self, mode: bool = True) -> "CountsFaults":
        super().train(mode)
        if mode:
            count_faults()  # gets the memory
            self.out.write_text(str(count_faults()))
        return self
