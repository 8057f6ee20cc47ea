"""What the steps add up to, kept on the device: the host does not look at a step's loss, so it never waits for one."""

import math
from collections.abc import Callable

import torch

from ddp_lab.strategies.base import sum_dtype

LONGEST = 1000  # steps whose losses are remembered


class Tally:
    """
    Args:
        leave_out: a step whose loss is not finite does not count in `totals`.

    Attributes:
        totals: [loss_sum, correct, count] of this rank's steps since somebody zeroed it, of `sum_dtype`.
        in_graph: the place of the next loss is counted on the device, where a CUDA graph can count it, too.
    """

    def __init__(self, device: torch.device, leave_out: bool = False):
        self.leave_out, self.in_graph = leave_out, False
        self.totals = torch.zeros(3, dtype=sum_dtype(device), device=device)
        self._losses = torch.zeros(LONGEST, dtype=sum_dtype(device), device=device)  # of step s at s % LONGEST
        self._step = 0
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._add = self._add_eagerly

    @property
    def state(self) -> list[torch.Tensor]:
        return [self.totals, self._losses, self._place]

    def begin(self, step: int) -> None:
        """Nothing so far, behind `step` steps."""
        self.totals.zero_()
        self._losses.zero_()
        self._step = step
        self._place.fill_(step % LONGEST)

    def compile(self, fuse: Callable) -> None:
        """Fuse the kernels of `add` by `fuse`, a torch.compile; for a tally whose steps are counted on the device."""
        self._add = fuse(self._add_eagerly)

    def add(self, sums: torch.Tensor) -> None:
        """The next step's [loss_sum, correct, count]. Two small kernels, as long as the host counts."""
        self._add(sums)

    def _add_eagerly(self, sums: torch.Tensor) -> None:
        if self.in_graph:
            self._place.add_(1).remainder_(LONGEST)
            self._losses.index_copy_(0, self._place, sums[:1])
        else:
            self._step += 1
            self._losses[self._step % LONGEST].copy_(sums[0], non_blocking=True)
        self.totals += torch.where(sums[0].isfinite(), sums, 0) if self.leave_out else sums

    def first_bad(self, step: int) -> torch.Tensor:
        """The number of the first step up to `step` whose loss was not finite, since this was asked last; inf without one.

        At least every LONGEST steps. [], of `sum_dtype`, on the device; does not wait for it.
        """
        places = torch.arange(LONGEST, dtype=self._losses.dtype, device=self._losses.device)
        numbers = step - (step - places) % LONGEST
        first = torch.where(self._losses.isfinite(), math.inf, numbers).min()
        self._losses.zero_()
        return first
