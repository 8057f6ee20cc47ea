"""What the steps add up to, kept on the device: the host does not look at a step's loss, so it never waits for one."""

import torch

NEVER = 2**62


class Tally:
    """
    Args:
        leave_out: a step whose loss is not finite does not count in `totals`.

    Attributes:
        totals: [loss_sum, correct, count] of this rank's steps since somebody zeroed it, float64.
        step: the number of the last step, [], int64.
        first_bad: the number of the first step whose loss was not finite since somebody looked, or NEVER, [], int64.
    """

    def __init__(self, device: torch.device, leave_out: bool = False):
        self.leave_out = leave_out
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.first_bad = torch.full((), NEVER, dtype=torch.int64, device=device)

    def begin(self, step: int) -> None:
        """Nothing so far, behind `step` steps."""
        self.totals.zero_()
        self.step.fill_(step)
        self.first_bad.fill_(NEVER)

    def add(self, sums: torch.Tensor) -> None:
        """The next step's [loss_sum, correct, count]."""
        self.step += 1
        finite = sums[0].isfinite()
        self.totals += torch.where(finite, sums, 0) if self.leave_out else sums
        self.first_bad.copy_(torch.minimum(self.first_bad, torch.where(finite, NEVER, self.step)))
