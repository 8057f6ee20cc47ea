"""Sums of loss and accuracy over the training steps, kept on the device, so that the host never waits for a step's loss."""

import math

import torch

from ddp_lab.strategies.compilation import CompileFn
from ddp_lab.strategies.loss import sum_dtype

LONGEST = 1000  # steps whose losses are kept


class Tally:
    """The sums of this rank's steps, and the losses of its last LONGEST steps.

    Args:
        device: where the sums are kept.
        skip_not_finite: a step whose loss is not finite does not count in `totals`.

    Attributes:
        totals: [loss_sum, correct, count] in `sum_dtype` since the training loop last zeroed it.
        in_graph: whether steps are counted on the device, as a CUDA graph requires, and not on the host.
    """

    def __init__(self, device: torch.device, skip_not_finite: bool = False):
        self.skip_not_finite, self.in_graph = skip_not_finite, False
        self.totals = torch.zeros(3, dtype=sum_dtype(device), device=device)
        self._losses = torch.zeros(LONGEST, dtype=sum_dtype(device), device=device)  # index s % LONGEST: step s
        self._step = 0
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._add = self._add_eagerly

    @property
    def state(self) -> list[torch.Tensor]:
        """The tensors that `add` changes."""
        return [self.totals, self._losses, self._place]

    def begin(self, step: int) -> None:
        """Clear the sums and losses. The next step has the number `step` + 1."""
        self.totals.zero_()
        self._losses.zero_()
        self._step = step
        self._place.fill_(step % LONGEST)

    def compile(self, compile_fn: CompileFn) -> None:
        """Compile `add`. `in_graph` must be set: a step number on the host would cause a recompilation at every step."""
        self._add = compile_fn(self._add_eagerly)

    def add(self, sums: torch.Tensor) -> None:
        """Count the next step.

        Args:
            sums: the step's [loss_sum, correct, count].
        """
        self._add(sums)

    def _add_eagerly(self, sums: torch.Tensor) -> None:
        if self.in_graph:
            self._place.add_(1).remainder_(LONGEST)
            self._losses.index_copy_(0, self._place, sums[:1])
        else:
            self._step += 1
            self._losses[self._step % LONGEST].copy_(sums[0], non_blocking=True)
        self.totals += torch.where(sums[0].isfinite(), sums, 0) if self.skip_not_finite else sums

    def first_bad(self, step: int) -> torch.Tensor:
        """Return the number of the first step since the last call whose loss is not finite; inf if there is none.

        Call it at least every LONGEST steps. It does not wait for the device.

        Args:
            step: number of the last step.

        Returns:
            [], in `sum_dtype`, on the device.
        """
        places = torch.arange(LONGEST, dtype=self._losses.dtype, device=self._losses.device)
        numbers = step - (step - places) % LONGEST
        first = torch.where(self._losses.isfinite(), math.inf, numbers).min()
        self._losses.zero_()
        return first
