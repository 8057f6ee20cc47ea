"""Lab: which operations run at the same time without parallel code, and which only on request.

python scripts/lab_overlap.py [--size 4096] [--matmuls 10] [--repeat 10] [--out runs/lab_overlap]

Automatic parallelism, Dive into Deep Learning, section 13.3, with timelines. On a GPU a call
returns when its work is queued. Work on the same queue (a stream) runs in the order of issue. Work
on different streams may overlap.

1. Matrix multiplications on two devices. Sequential: the host waits for the first device before it
  issues the second's work.
Concurrent: the host issues both, then waits; this should take as long as one device. Exercise: when
is the work too small for a second device (--size)? When the host takes longer to issue the work
than the device takes to compute it.

2. Matrix multiplications, and a copy of each result to the host. Three conditions let copy i
  overlap with multiplication i+1.
`non_blocking=True`: otherwise the host waits for copy i before it issues multiplication i+1. Pinned
memory: the copy engine needs pages that do not move; to pageable memory the driver copies through a
pinned buffer of its own and blocks the host meanwhile. A second stream: on the compute stream,
multiplication i+1 would run after copy i. On the second stream copy i must wait for the event
recorded after multiplication i, or it would copy incomplete data; the script checks all copies.

Without a GPU torch's calls are synchronous. A thread with one core then takes the place of a device
or stream.
"""

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from ddp_lab.observe.plot import beside, timeline

Work = Callable[[], object]
Box = tuple[float, float, str]  # start and end in seconds, and a label
Boxes = list[Box]
SIZE = {"cuda": 4096, "cpu": 512}


class Run(NamedTuple):
    """The seconds of a run, and its timeline: rows of boxes by name, from the first call on."""

    seconds: float
    rows: dict[str, Boxes]


class Lane:
    """A queue of work, run in the order of issue: a CUDA stream or a thread.

    It may overlap with the work of other lanes.

    Attributes:
        host: when Python issued and waited.
        queued: the work: futures of boxes, or pairs of events with a label.
    """

    def __init__(self, name: str, device: torch.device):
        self.name = name
        self.device = device
        self.host: Boxes = []
        self.queued: list[Any] = []
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
        else:
            self.pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def begin(self) -> None:
        """Clear the record.

        On an idle GPU an event happens when it is recorded, which relates its clock to the host's.
        """
        self.host = []
        self.queued = []
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.zero = self._mark()
            self.moment = time.perf_counter()

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def issue(self, label: str, work: Work, after: Any = None) -> Any:
        """Queue work, which starts after that of the handle `after`; return a handle of it."""
        start = time.perf_counter()
        done = (
            self._on_stream(label, work, after)
            if self.device.type == "cuda"
            else self._on_thread(label, work, after)
        )
        self.host.append((start, time.perf_counter(), "issue"))
        return done

    def _on_stream(
        self, label: str, work: Work, after: torch.cuda.Event | None
    ) -> torch.cuda.Event:
        with torch.cuda.stream(self.stream):  # its device becomes the current one as well
            if after is not None:
                self.stream.wait_event(after)
            start = self._mark()
            work()
            end = self._mark()
        self.queued.append((start, end, label))
        return end

    def _on_thread(self, label: str, work: Work, after: Future[Box] | None) -> Future[Box]:
        def run() -> Box:
            if after is not None:
                after.result()
            start = time.perf_counter()
            work()
            return start, time.perf_counter(), label

        self.queued.append(self.pool.submit(run))
        return self.queued[-1]

    def wait(self) -> None:
        """Wait until all issued work is done."""
        start = time.perf_counter()
        if self.device.type == "cuda":
            self.stream.synchronize()
        else:
            for future in self.queued:
                future.result()
        self.host.append((start, time.perf_counter(), "wait"))

    def ran(self) -> Boxes:
        """Return what ran, by the host's clock; on a GPU accurate to some microseconds."""
        if self.device.type != "cuda":
            return [future.result() for future in self.queued]
        times = [
            (self.zero.elapsed_time(start), self.zero.elapsed_time(end), label)
            for start, end, label in self.queued
        ]
        return [
            (self.moment + start / 1000, self.moment + end / 1000, label)
            for start, end, label in times
        ]


def once(lanes: list[Lane], variant: Work) -> Run:
    """Call `variant`, which issues work to the lanes, and wait for all of it."""
    for lane in lanes:
        lane.begin()
    start = time.perf_counter()
    variant()
    for lane in lanes:
        lane.wait()
    seconds = time.perf_counter() - start
    rows = {"host": sorted(box for lane in lanes for box in lane.host)} | {
        lane.name: lane.ran() for lane in lanes
    }
    return Run(
        seconds,
        {
            name: [(a - start, b - start, label) for a, b, label in row]
            for name, row in rows.items()
            if row
        },
    )


def median(lanes: list[Lane], variant: Work, repeat: int) -> Run:
    """Return the run with the median time of `repeat`, after two warm-up runs.

    Its timeline is that of this run.
    """
    return sorted(
        [once(lanes, variant) for _ in range(repeat + 2)][2:], key=lambda run: run.seconds
    )[repeat // 2]


def on_two(pair: list[Lane], size: int, matmuls: int) -> dict[str, Work]:
    """Return the variants of part 1. Memory is allocated here, outside the timed runs."""

    def load(lane: Lane) -> Work:
        matrix = torch.randn(size, size, device=lane.device)
        work = partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix))
        return lambda: [lane.issue("matmul", work) for _ in range(matmuls)]

    first, second = (load(lane) for lane in pair)
    return {
        f"{pair[0].name} alone": first,
        f"{pair[1].name} alone": second,
        "sequential": lambda: (first(), pair[0].wait(), second()),
        "concurrent": lambda: (first(), second()),
    }


def with_copies(lanes: list[Lane], size: int, matmuls: int, repeat: int) -> dict[str, Run]:
    """Run the variants of part 2 on one lane for computing and one for copying.

    Raises:
        AssertionError: a copy on a second stream differs from the result of its multiplication.
    """
    compute, copy = lanes
    gpu = compute.device.type == "cuda"
    every = range(matmuls)
    matrix = torch.randn(size, size, device=compute.device)
    results = [torch.empty_like(matrix) for _ in every]
    pinned = [torch.empty(size, size, pin_memory=gpu) for _ in every]
    pageable = [torch.empty(size, size) for _ in every] if gpu else []

    def matmul(i: int) -> object:
        return compute.issue("matmul", partial(torch.mm, matrix, matrix, out=results[i]))

    def copied(
        i: int, lane: Lane = compute, host: list[torch.Tensor] = pinned, after: object = None
    ) -> None:
        lane.issue("copy", partial(host[i].copy_, results[i], non_blocking=True), after)

    variants: dict[str, Work] = {
        "matmuls alone": lambda: [matmul(i) for i in every],
        "copies alone": lambda: [copied(i) for i in every],
        "sequential": lambda: (
            [matmul(i) for i in every],
            compute.wait(),
            [copied(i) for i in every],
        ),
        "one stream": lambda: [(matmul(i), copied(i)) for i in every],
        "two streams": lambda: [copied(i, copy, after=matmul(i)) for i in every],
    }
    if gpu:
        variants["two, pageable"] = lambda: [copied(i, copy, pageable, matmul(i)) for i in every]
    medians = {name: median(lanes, variant, repeat) for name, variant in variants.items()}
    for tensor in (*results, *pinned):
        tensor.zero_()
    once(lanes, variants["two streams"])
    right = (torch.equal(result.cpu(), host) for result, host in zip(results, pinned, strict=True))
    assert all(right), "a copy started too early"
    return medians


def show(title: str, runs: dict[str, Run]) -> None:
    """Print the milliseconds of runs as a table."""
    print(f"\n{title}\n{'':<24}{'ms':>14}")
    for name, run in runs.items():
        print(f"{name:<24}{1000 * run.seconds:>14.3f}")


def main() -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = "cuda" if gpus else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        default="runs/lab_overlap",
        help="path of the picture without its suffix: OUT.png is written",
    )
    parser.add_argument(
        "--size",
        type=int,
        default=SIZE[kind],
        help="rows and columns of a matrix; default: 4096, CPU: 512",
    )
    parser.add_argument(
        "--matmuls", type=int, default=10, help="matrix multiplications on each device"
    )
    parser.add_argument("--repeat", type=int, default=10)
    arguments = parser.parse_args()
    for name in ("size", "matmuls", "repeat"):
        if getattr(arguments, name) < 1:
            sys.exit(f"error: --{name} {getattr(arguments, name)}: must be at least 1")
    picture = Path(arguments.out).with_suffix(".png")
    picture.parent.mkdir(parents=True, exist_ok=True)
    size = arguments.size
    matmuls = arguments.matmuls
    repeat = arguments.repeat
    devices = [torch.device(kind, i % gpus) if gpus else torch.device(kind) for i in range(2)]
    prefix = "stream" if gpus else "thread"
    names = [str(device) if gpus > 1 else f"{prefix} {i}" for i, device in enumerate(devices)]
    if gpus < 2:
        print(
            f"{'one GPU: two of its streams' if gpus else 'no GPU: two threads of one core each'} "
            "stand for two devices"
        )

    pair = [Lane(name, device) for name, device in zip(names, devices, strict=True)]
    twice = {
        name: median(pair, variant, repeat) for name, variant in on_two(pair, size, matmuls).items()
    }
    show(f"1. {matmuls} matmuls of {size} x {size} on each of two devices", twice)
    copies = with_copies(
        [Lane("compute", devices[0]), Lane("copy", devices[0])], size, matmuls, repeat
    )
    show(
        f"2. {matmuls} matmuls of {size} x {size} on {devices[0]}, each copied to the host", copies
    )
    print("every copy is correct")
    titles = {
        "Matrix multiplications on two devices": twice,
        "Matrix multiplications and copies to the host": copies,
    }
    drawn: list[Any] = []
    for title, runs in titles.items():
        rows = {
            f"{variant}: {name}": row
            for variant, run in runs.items()
            for name, row in run.rows.items()
        }
        boxes = {
            name: [(1000 * start, 1000 * end, label, "") for start, end, label in row]
            for name, row in rows.items()
        }
        drawn.append(timeline(title, "ms", boxes))
    beside(drawn, picture)
    print(f"\n{picture}")


if __name__ == "__main__":
    main()
