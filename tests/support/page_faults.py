"""A count of page faults while tensors are allocated and freed, also as a task of a run."""

import resource
from pathlib import Path

import torch

from ddp_lab.tasks import Classification

# of a round: tensors, and pages of 4 KiB in each
TENSORS = 10
PAGES = 1024
ROUNDS = 10


def count_faults() -> int:
    """Return the page faults of some rounds in which tensors are allocated and freed in reverse
    order.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(ROUNDS):
        activations = [torch.ones(PAGES * 1024) for _ in range(TENSORS)]
        while activations:
            activations.pop()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


class CountsFaults(Classification):
    """Classification that writes the page faults of the second count at the beginning of the last
    epoch.

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
