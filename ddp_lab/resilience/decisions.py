"""The decision to stop a run, which must be the same on all ranks.

A run stops at a loss that is not finite, on a preemption, or if a checkpoint cannot be written. Each rank has a part of the
information (its own loss, a signal that it received). One small all_reduce, an exchange, combines the parts. All ranks run it
after the same step and act on the same result. It does not run after every step but about twice a second, because the ranks
wait for it and for their devices: each exchange also determines the number of steps until the next one.
"""

import math
import signal
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_lab.training.metrics import LONGEST, RunningSums
from ddp_lab.world.process import REQUESTS
from ddp_lab.world.runtime import Runtime

PERIOD = 0.5  # approximate seconds between two exchanges


class Agreement(NamedTuple):
    """The result of an exchange, the same on every rank.

    Attributes:
        not_finite: (step, rank) of the first loss since the last exchange that is not finite; None if all are finite.
        preempted: whether any rank received SIGTERM, SIGUSR1 or Ctrl-C.
        save_failed: whether the last checkpoint could not be written.
        weights_not_finite: whether any of the given weights is not finite.
    """

    not_finite: tuple[int, int] | None
    preempted: bool
    save_failed: bool
    weights_not_finite: bool


class Decisions:
    """The exchanges of a run. Call `exchange` after each step that is `due`, and before an irreversible action.

    Attributes:
        preempted: whether this rank received SIGTERM, SIGUSR1 or Ctrl-C.
        interrupted: whether it received Ctrl-C.
    """

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.preempted = self.interrupted = False

    def begin(self, step: int, running_sums: RunningSums) -> None:
        """Begin before the first step of this launch. Call it before any other method except `listen`.

        Args:
            step: number of optimizer steps that the run has taken so far.
            running_sums: holds the losses of the steps.
        """
        self.running_sums = running_sums
        running_sums.begin(step)
        self._next, self._last_step, self._last_time = step + 1, step, time.monotonic()

    def listen(self) -> None:
        """Treat SIGTERM, SIGUSR1 and Ctrl-C as a request to save a checkpoint and exit. Call it in the main thread."""
        for number in REQUESTS:
            signal.signal(number, self._preempt)

    def _preempt(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.preempted and not self.runtime.under_torchrun:  # torchrun repeats the signal itself
            raise KeyboardInterrupt  # the second Ctrl-C exits immediately
        self.preempted = True
        self.interrupted = self.interrupted or number == signal.SIGINT

    def due(self, step: int) -> bool:
        """Return whether an exchange follows step `step`; the same on every rank."""
        return step >= self._next

    def exchange(self, step: int, save_failed: bool, weights: Iterable[torch.Tensor] = ()) -> Agreement:
        """Exchange about the steps since the last exchange, and about the weights. Collective; waits for the device.

        Args:
            step: number of the last step that was taken.
            save_failed: whether this rank failed to write the last checkpoint.
            weights: the tensors of this rank to check for values that are not finite.
        """
        device, world_size = self.runtime.device, self.runtime.world_size
        # The first step whose loss is not finite and its rank are encoded in one negative number: MAX finds the earliest.
        first = -(self.running_sums.first_bad(step) * world_size + self.runtime.rank)
        elapsed = max(time.monotonic() - self._last_time, 1e-6)
        steps = min(LONGEST, max(1, round((step - self._last_step) * PERIOD / elapsed)))
        self._last_step, self._last_time = step, time.monotonic()
        host = torch.tensor([float(self.preempted), float(save_failed), -float(steps)], dtype=first.dtype)
        bad_weights = [1.0 - tensor.isfinite().all().to(first) for tensor in weights]
        bad_weights = torch.stack(bad_weights).max() if bad_weights else torch.zeros_like(first)
        combined = torch.cat([torch.stack([first.to(device), bad_weights.to(device)]), host.to(device)])
        combined = self.runtime.all_reduce(combined, dist.ReduceOp.MAX)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # in a file of torch, by which the watchdog recognises a rank that waits
        found, bad, preempted, failed, steps = combined.tolist()
        self._next = step + int(-steps)
        not_finite = None if found == -math.inf else divmod(int(-found), world_size)
        return Agreement(not_finite, bool(preempted), bool(failed), bool(bad))
