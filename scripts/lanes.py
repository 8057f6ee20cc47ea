"""Queues that work runs on, CUDA streams or threads, and the record of when what ran on them."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from ddp_lab.observe.plot import Boxes

Work = Callable[[], object]


class Run(NamedTuple):
    """Seconds from the first call to the end of all work; what ran when, in seconds since that call, by row."""

    seconds: float
    rows: dict[str, Boxes]


class Lane:
    """A queue: what is issued to it runs in that order, beside the work of other lanes."""

    def __init__(self, name: str, device: torch.device):
        self.name, self.device = name, device
        self.host: Boxes = []  # when Python issued and waited
        self.queued: list[Any] = []

    def begin(self, zeros: dict[torch.device, Any]) -> None:
        """Forgets what ran. `zeros` holds, by device, what its lanes count time from."""
        self.host, self.queued = [], []

    def issue(self, label: str, work: Work, after: Any = None) -> Any:
        """Queues the work, to start behind `after` of any lane; returns what another work's `after` can be."""
        start = time.perf_counter()
        done = self.put(label, work, after)
        self.host.append((start, time.perf_counter(), "issue"))
        return done

    def wait(self) -> None:
        """Until all that was issued is done."""
        start = time.perf_counter()
        self.finish()
        self.host.append((start, time.perf_counter(), "wait"))


class Stream(Lane):
    """A CUDA stream. Events time its work by the device's clock: two for each piece, a few microseconds of the host's time."""

    def __init__(self, name: str, device: torch.device):
        super().__init__(name, device)
        self.stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # belongs to the device of the stream that records it
        event.record(self.stream)
        return event

    def begin(self, zeros: dict[torch.device, Any]) -> None:
        super().begin(zeros)
        torch.cuda.synchronize(self.device)  # an event on an idle device happens when it is recorded
        if self.device not in zeros:  # events of two devices cannot be compared: the host's clock stands between them
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
        """By the host's clock, to some microseconds."""

        def at(event: torch.cuda.Event) -> float:
            return self.moment + self.zero.elapsed_time(event) / 1000

        return [(at(start), at(end), label) for start, end, label in self.queued]


class Thread(Lane):
    """A thread of one core that works off a queue: a stream for machines without a GPU."""

    def __init__(self, name: str, device: torch.device):
        super().__init__(name, device)
        self.pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def put(self, label: str, work: Work, after: Future | None) -> Future:
        def run() -> tuple[float, float, str]:
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
    return (Stream if device.type == "cuda" else Thread)(name, device)


def once(lanes: list[Lane], variant: Work) -> Run:
    """Calls `variant`, which issues work to the lanes, and waits for all of it."""
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
    """`repeat` runs, the quickest first, after two that do not count."""
    return sorted([once(lanes, variant) for _ in range(repeat + 2)][2:], key=lambda run: run.seconds)
