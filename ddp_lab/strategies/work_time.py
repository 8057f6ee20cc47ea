"""How long a rank computes in a step: from its first forward pass to its last gradient.

In a step of data parallelism every rank waits for the slowest one, so all steps take equally long.
What differs is the time before the ranks wait for each other:

    rank 0   forward backward | waits for rank 1 . . . . | all_reduce, optimizer
    rank 1   forward   backward   (a slower device)      | all_reduce, optimizer
             begin                                    end

On a CPU each step is timed by the clock. On a GPU the host does not know when a kernel ends, so two
events are recorded between the kernels, which a short step would notice. Between two exchanges of
the ranks (training/sync.py) one step stands for all of them. A captured step has its events in a
second graph, which is replayed for that step.
"""

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager

import torch

NEVER = -1  # steps before the next one that is timed


class WorkTimer(ABC):
    """A timer of this rank's work. `begin` and `end` are called once in each step."""

    @abstractmethod
    def begin(self) -> None:
        """Begin before the first forward pass of a step."""

    @abstractmethod
    def end(self) -> None:
        """End where the last gradient of the step is computed, before the ranks wait."""

    @abstractmethod
    def take(self, steps: int) -> float:
        """Return the seconds of work in the `steps` since the last call; 0 if they are not known.

        It does not wait for the device.
        """


class HostTimer(WorkTimer):
    """Times each step by the clock, on a device that computes while the host waits."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._seconds = 0.0

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def end(self) -> None:
        self._seconds += time.perf_counter() - self._begun

    def take(self, steps: int) -> float:
        seconds = self._seconds
        self._seconds = 0.0
        return seconds


class EventTimer(WorkTimer):
    """Times one step between two calls of `take` by CUDA events, about in the middle of them.

    The first step after an exchange is not typical: the host has waited for the device, whose queue
    is empty.

    Attributes:
        works_in_graphs: whether events that a CUDA graph records have a time, for which torch needs
            external events.
    """

    def __init__(self) -> None:
        self.works_in_graphs = "external" in inspect.signature(torch.cuda.Event.__new__).parameters
        external = {"external": True} if self.works_in_graphs else {}
        self.started = torch.cuda.Event(enable_timing=True, **external)
        self.ended = torch.cuda.Event(enable_timing=True, **external)
        self._left = NEVER
        self._is_on = False  # in this step
        self._is_pending = False  # the events of a step may be still ahead of the device
        self._last = 0.0

    def is_due(self) -> bool:
        """Return whether the step that begins is timed. Call it once in a step."""
        self._left -= 1
        return self._left == NEVER

    def begin(self) -> None:
        self._is_on = self.is_due()
        if self._is_on:
            self.started.record()

    def end(self) -> None:
        if self._is_on:
            self.ended.record()
            self._is_on = False
            self._is_pending = True

    def replayed(self) -> None:
        """Note that a graph has recorded the events, in place of `begin` and `end`."""
        self._is_pending = True

    def take(self, steps: int) -> float:
        if self._is_pending and self.ended.query():
            self._last = self.started.elapsed_time(self.ended) / 1000
            self._is_pending = False
        if not self._is_pending:
            self._left = steps // 2
        return self._last * steps

    @contextmanager
    def in_graph(self) -> Generator[None]:
        """Let the step that the body captures record the events."""
        self.started.record()  # creates them, which a capture should not
        self.ended.record()
        self._left = 0
        yield
        self._left = NEVER
        self._is_pending = False


def make_timer(device: torch.device) -> WorkTimer:
    """Return the timer of a rank on this device."""
    return EventTimer() if device.type == "cuda" else HostTimer()
