"""What all ranks must decide alike: to stop because a loss is not finite, because the machine is wanted back, or because
no checkpoint can be written.

Every rank knows a part (its own loss, a signal it got). One small all_reduce puts them together; all ranks do it after the
same steps and act on the same answer. It is not done after every step, but about twice a second: each time the ranks agree
on how many steps that is. On GPUs nobody waits for it, either: the answer of one exchange is read at the next one.
"""

import math
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_lab.training.tally import LONGEST, Tally
from ddp_lab.world.runtime import Runtime

PERIOD = 0.5  # seconds between two exchanges, about


@dataclass(frozen=True)
class Verdict:
    """The same on every rank.

    Attributes:
        not_finite: (step, rank) of the first loss that was not finite since the last exchange.
        preempted: some rank was told to leave (SIGTERM, SIGUSR1, Ctrl-C).
        unwritten: the last checkpoint could not be written.
        ruined: some weights are not finite.
    """

    not_finite: tuple[int, int] | None
    preempted: bool
    unwritten: bool
    ruined: bool


class Answer:
    """A small tensor on its way to the host, behind the work that was queued before it and not what is queued after."""

    def __init__(self, tensor: torch.Tensor):
        self.host, self.arrived = tensor, None
        if tensor.device.type == "cuda":
            self.host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> list[float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.host.tolist()


class Decisions:
    """Call `after` behind a step that is `due`, `now` before anything that must not be regretted."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.preempted = False
        self._answer: Answer | None = None

    def begin(self, step: int, tally: Tally) -> None:
        """Behind which step this launch starts, and where its steps' losses are."""
        self.tally = tally
        tally.begin(step)
        self._next, self._last_step, self._last_time = step + 1, step, time.monotonic()

    def listen(self) -> None:
        """Takes SIGTERM, SIGUSR1 and Ctrl-C as a request to save and leave. Call it in the main thread."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._preempt)

    def _preempt(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.preempted and not self.runtime.under_torchrun:  # which sends it again itself
            raise KeyboardInterrupt  # asked for twice: at once
        self.preempted = True

    def due(self, step: int) -> bool:
        return step >= self._next

    def after(self, step: int, unwritten: bool) -> Verdict | None:
        """At the boundary behind `step`, when it is `due`."""
        earlier, self._answer = self._answer, self._exchange(step, unwritten)
        if self.runtime.device.type != "cuda":
            earlier, self._answer = self._answer, None  # it is there already
        if earlier is None:
            self._next = step + 1
            return None
        return self._read(earlier, step)

    def now(self, step: int, unwritten: bool, weights: Iterable[torch.Tensor] = ()) -> Verdict:
        """As `after`, but at once, about all steps so far and about the `weights`. Waits for the device."""
        earlier, self._answer = self._answer, None
        verdict = self._read(self._exchange(step, unwritten, weights), step)
        before = self._read(earlier, step) if earlier is not None else verdict
        return Verdict(
            before.not_finite or verdict.not_finite,
            before.preempted or verdict.preempted,
            before.unwritten or verdict.unwritten,
            verdict.ruined,
        )

    def _exchange(self, step: int, unwritten: bool, weights: Iterable[torch.Tensor] = ()) -> Answer:
        # The first step that was not finite and its rank in one number, negative, so that MAX finds the earliest.
        first = -(self.tally.first_bad(step) * self.runtime.world_size + self.runtime.rank)
        elapsed = max(time.monotonic() - self._last_time, 1e-6)
        steps = min(LONGEST, max(1, round((step - self._last_step) * PERIOD / elapsed)))
        self._last_step, self._last_time = step, time.monotonic()
        host = torch.tensor([float(self.preempted), float(unwritten), -float(steps)], dtype=first.dtype)
        ruined = [1.0 - tensor.isfinite().all().to(first) for tensor in weights]
        ruined = torch.stack(ruined).max() if ruined else torch.zeros_like(first)
        answer = torch.cat(
            [torch.stack([first.to(self.runtime.device), ruined]), host.to(self.runtime.device, non_blocking=True)]
        )
        if self.runtime.world_size > 1:
            dist.all_reduce(answer, op=dist.ReduceOp.MAX)
        return Answer(answer)

    def _read(self, answer: Answer, step: int) -> Verdict:
        first, ruined, preempted, unwritten, steps = answer.read()
        self._next = step + int(-steps)
        not_finite = None if first == -math.inf else divmod(int(-first), self.runtime.world_size)
        return Verdict(not_finite, bool(preempted), bool(unwritten), bool(ruined))
