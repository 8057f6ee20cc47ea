"""The decision to stop a run, which must be the same on all ranks.

A run stops at a loss that is not finite, on a preemption, or if a checkpoint cannot be written. Each rank has a part of the
information (its own loss, a signal that it received). One small all_reduce, an exchange, combines the parts. All ranks run it
after the same step and act on the same result. It does not run after every step but about twice a second: each exchange also
determines the number of steps until the next one. On GPUs no rank waits for the result, which is read at the next exchange.
"""

import math
import signal
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from ddp_lab.training.metrics import LONGEST, RunningSums
from ddp_lab.world.process import REQUESTS
from ddp_lab.world.runtime import Runtime

PERIOD = 0.5  # approximate seconds between two exchanges


@dataclass(frozen=True)
class Agreement:
    """The result of an exchange, the same on every rank.

    Attributes:
        not_finite: (step, rank) of the first loss since the last exchange that is not finite; None if all are finite.
        preempted: whether any rank received SIGTERM, SIGUSR1 or Ctrl-C.
        save_failed: whether the last checkpoint could not be written.
        weights_not_finite: whether any weight is not finite. Only `Decisions.now` checks the weights.
    """

    not_finite: tuple[int, int] | None
    preempted: bool
    save_failed: bool
    weights_not_finite: bool


class HostCopy:
    """An asynchronous copy of a small tensor to the host. Reading it waits only for work that was queued before the copy."""

    def __init__(self, tensor: torch.Tensor):
        self.host, self.arrived = tensor, None
        if tensor.device.type == "cuda":
            self.host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> list[float]:
        """Return the values. Waits until the copy has arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.host.tolist()


class Decisions:
    """The exchanges of a run. Call `after` after each step that is `due`, and `now` before an irreversible action.

    Attributes:
        preempted: whether this rank received SIGTERM, SIGUSR1 or Ctrl-C.
        interrupted: whether it received Ctrl-C.
    """

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.preempted = self.interrupted = False
        self._pending: HostCopy | None = None

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

    def after(self, step: int, save_failed: bool) -> Agreement | None:
        """Exchange after step `step`, if it is `due`. Collective.

        Args:
            step: number of the step that was just taken.
            save_failed: whether this rank failed to write the last checkpoint.

        Returns:
            On CPUs the result of this exchange. On GPUs that of the previous one, without waiting; None at the first exchange.
        """
        earlier, self._pending = self._pending, self._exchange(step, save_failed)
        if self.runtime.device.type != "cuda":
            earlier, self._pending = self._pending, None  # on the CPU the result is already available
        if earlier is None:
            self._next = step + 1
            return None
        return self._read(earlier, step)

    def now(self, step: int, save_failed: bool, weights: Iterable[torch.Tensor] = ()) -> Agreement:
        """Exchange about all steps so far and about the weights. Collective; waits for the device.

        Args:
            step: number of the last step that was taken.
            save_failed: whether this rank failed to write the last checkpoint.
            weights: the tensors of this rank to check for values that are not finite.

        Returns:
            The result of this exchange, combined with that of an earlier one that has not been read yet.
        """
        earlier, self._pending = self._pending, None
        agreed = self._read(self._exchange(step, save_failed, weights), step)
        before = self._read(earlier, step) if earlier is not None else agreed
        return Agreement(*(one or other for one, other in zip(astuple(before), astuple(agreed), strict=True)))

    def _exchange(self, step: int, save_failed: bool, weights: Iterable[torch.Tensor] = ()) -> HostCopy:
        # The first step whose loss is not finite and its rank are encoded in one negative number: MAX finds the earliest.
        first = -(self.running_sums.first_bad(step) * self.runtime.world_size + self.runtime.rank)
        elapsed = max(time.monotonic() - self._last_time, 1e-6)
        steps = min(LONGEST, max(1, round((step - self._last_step) * PERIOD / elapsed)))
        self._last_step, self._last_time = step, time.monotonic()
        host = torch.tensor([float(self.preempted), float(save_failed), -float(steps)], dtype=first.dtype)
        bad_weights = [1.0 - tensor.isfinite().all().to(first) for tensor in weights]
        bad_weights = torch.stack(bad_weights).max() if bad_weights else torch.zeros_like(first)
        combined = torch.cat(
            [torch.stack([first.to(self.runtime.device), bad_weights]), host.to(self.runtime.device, non_blocking=True)]
        )
        return HostCopy(self.runtime.all_reduce(combined, dist.ReduceOp.MAX))

    def _read(self, result: HostCopy, step: int) -> Agreement:
        first, bad_weights, preempted, save_failed, steps = result.read()
        self._next = step + int(-steps)
        not_finite = None if first == -math.inf else divmod(int(-first), self.runtime.world_size)
        return Agreement(not_finite, bool(preempted), bool(save_failed), bool(bad_weights))
