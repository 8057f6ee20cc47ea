"""How long sums over the ranks take, by algorithm and size: the project's and a learner's.

bucketed works during a backward pass. Here that pass computes nothing and only hands the gradients
over, so all of the communication is exposed: its times are comparable with the others', and are the
most that it adds to a step.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.exercises.catalog import Exercise
from ddp_lab.exercises.explain import Call
from ddp_lab.exercises.processes import explain_outcomes, run_ranks
from ddp_lab.observe.plot import Curve, beside, curves
from ddp_lab.strategies.all_reduce import ALGORITHMS
from ddp_lab.strategies.buckets import Buckets, MiB, fill_buckets
from ddp_lab.strategies.contiguous import flatten

# from the tensors to what is timed, which sums them
Prepare = Callable[[list[torch.Tensor]], Callable[[], object]]
Times = dict[str, list[tuple[float, float]]]  # (bytes, milliseconds) by algorithm

TENSORS = 8  # as many as LeNet has parameters
BUCKET = 50 * MiB  # the default of strategy.bucket_mb
SIZES = [2**power for power in range(12, 25, 2)]  # bytes of all tensors together
GROWTH = 4  # of each size over the last
SECONDS = 8.0  # for all sizes of an exercise
LIMIT = 30.0  # seconds after which its processes are ended


def bucketed(tensors: list[torch.Tensor]) -> Callable[[], object]:
    """Return a backward pass that hands over these gradients and sums them in buckets."""
    parameters = [nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    buckets = Buckets(fill_buckets(parameters, BUCKET))

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(parameters, tensors)
        buckets.finish()

    return run


PROJECT: dict[str, Prepare] = {
    name: partial(partial, algorithm) for name, algorithm in ALGORITHMS.items()
}
PROJECT["bucketed"] = bucketed

Sum = Callable[[ModuleType, list[torch.Tensor]], object]
# as the project's own does it: a star for each tensor, a ring for all of them, buckets of a size
LEARNERS: dict[str, Sum] = {
    "star_all_reduce": lambda theirs, tensors: [
        theirs.star_all_reduce(tensor) for tensor in tensors
    ],
    "ring_all_reduce": lambda theirs, tensors: theirs.ring_all_reduce(flatten(tensors)),
    "buckets": lambda theirs, tensors: theirs.all_reduce_buckets(
        tensors, BUCKET // tensors[0].element_size()
    ),
}


def milliseconds(function: Callable[[], object], device: torch.device, repeat: int) -> float:
    """Return the median time of `repeat` calls begun by all ranks together, after two warm-ups."""
    times = list[float]()
    for _ in range(repeat + 2):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[2:])


def by_size(
    algorithms: Mapping[str, Prepare],
    device: torch.device,
    sizes: list[int],
    repeat: int,
    seconds: float = math.inf,
) -> Times:
    """Return the time of each algorithm for each size. Collective.

    Args:
        algorithms: by name.
        device: of the tensors.
        sizes: bytes, each GROWTH times the last.
        repeat: number of calls whose median is taken.
        seconds: a size that is expected to end later, and those after it, are left out; the first
            is always measured.
    """
    times: Times = {name: [] for name in algorithms}
    for prepare in algorithms.values():
        # connections are opened when they are first used
        prepare([torch.ones(1000, device=device)])()
    begin = time.monotonic()
    for size in sizes:
        start = time.monotonic()
        for name, prepare in algorithms.items():
            tensors = [torch.randn(size // 4 // TENSORS, device=device) for _ in range(TENSORS)]
            times[name].append((size, milliseconds(prepare(tensors), device, repeat)))
        now = time.monotonic()
        end = torch.tensor(now - begin + GROWTH * (now - start), device=device)
        dist.all_reduce(end, dist.ReduceOp.MAX)  # all ranks decide the same
        if end > seconds:
            break
    return times


def report(times: Times, ranks: int, picture: Path) -> None:
    """Print the table and draw it; `model` is dashed."""
    print(f"milliseconds of a sum over {ranks} ranks, {TENSORS} tensors together")
    print(f"{'bytes':>12}" + "".join(f"{name:>12}" for name in times))
    for row, (size, _) in enumerate(times["flat"]):
        print(f"{size:>12,}" + "".join(f"{points[row][1]:>12.3f}" for points in times.values()))
    lines = [Curve(name, points, dashed=name == "model") for name, points in times.items()]
    beside([curves(f"All-reduce over {ranks} ranks", "bytes", "ms", lines, log="xy")], picture)
    print(f"\n{picture}")


def compare(
    exercise: Exercise,
    file: Path,
    picture: Path,
    sizes: list[int] = SIZES,
    seconds: float = SECONDS,
) -> str | None:
    """Time a learner's right solution beside the project's algorithms; print and draw the times.

    Returns:
        Why there are no times: what raised, or which rank waits where; None if there are.
    """
    ranks = max(exercise.check.RANKS)

    def measure(theirs: ModuleType, calls: list[Call]) -> Times:
        sys.setprofile(None)  # recording the calls takes time
        yours = partial(partial, LEARNERS[exercise.name], theirs)
        return by_size(
            {"yours": yours, **PROJECT}, torch.device("cpu"), sizes, repeat=5, seconds=seconds
        )

    outcomes = run_ranks(file, ranks, measure, LIMIT)
    if any(outcome.kind != "passed" for outcome in outcomes):
        return explain_outcomes(exercise, outcomes, LIMIT)
    times: Any = outcomes[0].result
    report(times, ranks, picture)
    left_out = sizes[len(times["yours"]) :]
    if left_out:
        print(
            f"From {left_out[0]:,} bytes on it would take more than {seconds:g} seconds, so these "
            "sizes are left out."
        )
    return None
