"""Lanes: queues of work (CUDA streams or threads) that record what ran on them and when."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from ddp_lab.observe.plot import Boxes

Work = Callable[[], object]
Box = tuple[float, float, str]  # start and end in seconds, and a label


class Run(NamedTuple):
    """One timed run.

    Attributes:
        seconds: time from the first call to the end of all work.
        rows: a timeline: what ran on the host and on each lane, in seconds since the first call.
    """

    seconds: float
    rows: dict[str, Boxes]


class Lane:
    """A queue of work, which runs in the order of issue and may overlap with the work of other lanes.

    Args:
        name: name of its row in a timeline.
        device: where its work runs.
    """

    def __init__(self, name: str, device: torch.device):
        self.name, self.device = name, device
        self.host: Boxes = []  # when Python issued and waited
        self.queued: list[Any] = []

    def begin(self, zeros: dict[torch.device, Any]) -> None:
        """Clear the record. `zeros` holds the origin of time of each device, which its lanes share."""
        self.host, self.queued = [], []

    def issue(self, label: str, work: Work, after: Any = None) -> Any:
        """Queue work.

        Args:
            label: label of its box in a timeline.
            work: the function to call.
            after: return value of another `issue`, on any lane, whose work must be done first; None: no condition.

        Returns:
            A handle of this work, for another work's `after`.
        """
        start = time.perf_counter()
        done = self.put(label, work, after)
        self.host.append((start, time.perf_counter(), "issue"))
        return done

    def wait(self) -> None:
        """Wait until all issued work is done."""
        start = time.perf_counter()
        self.finish()
        self.host.append((start, time.perf_counter(), "wait"))


class Stream(Lane):
    """A CUDA stream. Two events time each piece of work by the device's clock, which costs the host a few microseconds."""

    def __init__(self, name: str, device: torch.device):
        super().__init__(name, device)
        self.stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """Record an event on the stream."""
        event = torch.cuda.Event(enable_timing=True)  # belongs to the device of the stream on which it is recorded
        event.record(self.stream)
        return event

    def begin(self, zeros: dict[torch.device, Any]) -> None:
        super().begin(zeros)
        torch.cuda.synchronize(self.device)  # an event on an idle device happens when it is recorded
        if self.device not in zeros:  # events of two devices cannot be compared, so the host's clock relates them
            zeros[self.device] = self.mark(), time.perf_counter()
        self.zero, self.moment = zeros[self.device]

    def put(self, label: str, work: Work, after: torch.cuda.Event | None) -> torch.cuda.Event:
        with torch.cuda.stream(self.stream):  # its device becomes the current one as well
            if after is not None:
                self.stream.wait_event(after)
            start = self.mark()
            work()
            end = self.mark()
        self.queued.append((start, end, label))
        return end

    def finish(self) -> None:
        self.stream.synchronize()

    def ran(self) -> Boxes:
        """Return what ran, by the host's clock, accurate to some microseconds."""

        def at(event: torch.cuda.Event) -> float:
            return self.moment + self.zero.elapsed_time(event) / 1000

        return [(at(start), at(end), label) for start, end, label in self.queued]


class Thread(Lane):
    """A thread of one core that processes a queue: the stand-in for a stream on machines without a GPU."""

    def __init__(self, name: str, device: torch.device):
        super().__init__(name, device)
        self.pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def put(self, label: str, work: Work, after: Future[Box] | None) -> Future[Box]:
        def run() -> Box:
            if after is not None:
                after.result()
            start = time.perf_counter()
            work()
            return start, time.perf_counter(), label

        self.queued.append(self.pool.submit(run))
        return self.queued[-1]

    def finish(self) -> None:
        for future in self.queued:
            future.result()

    def ran(self) -> Boxes:
        return [future.result() for future in self.queued]


def lane(name: str, device: torch.device) -> Lane:
    """Return a stream on a GPU, a thread on a CPU."""
    return (Stream if device.type == "cuda" else Thread)(name, device)


def once(lanes: list[Lane], variant: Work) -> Run:
    """Call `variant`, which issues work to the lanes, and wait for all of it."""
    zeros: dict[torch.device, Any] = {}
    for one in lanes:
        one.begin(zeros)
    start = time.perf_counter()
    variant()
    for one in lanes:
        one.wait()
    seconds = time.perf_counter() - start
    rows = {"host": sorted(box for one in lanes for box in one.host)} | {one.name: one.ran() for one in lanes}
    return Run(seconds, {name: [(a - start, b - start, label) for a, b, label in row] for name, row in rows.items() if row})


def repeated(lanes: list[Lane], variant: Work, repeat: int) -> list[Run]:
    """Return `repeat` runs, the fastest first, after two warm-up runs."""
    return sorted([once(lanes, variant) for _ in range(repeat + 2)][2:], key=lambda run: run.seconds)
