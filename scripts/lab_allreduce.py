"""Lab: the cost of an all-reduce by several algorithms, by torch.distributed, and by the model.

torchrun --standalone --nproc_per_node=4 scripts/lab_allreduce.py [--out runs/lab_allreduce]

The table has the milliseconds of summing eight tensors, for increasing sizes: the five algorithms
of strategy=scratch (ddp_lab/exercises/speed.py says how bucketed is timed), and `library`, one call
of `torch.distributed.all_reduce` on all eight. The cost model of a ring of k ranks (Patarasuk and
Yuan 2009) is 2 (k-1)/k n bytes at the link's bandwidth plus 2 (k-1) times its latency. Bandwidth
and latency are derived from the library's smallest and largest call, so only the rows between them
are predictions.

This is an exercise of Dive into Deep Learning, section 13.5: how can its all-reduce (star) be made
more efficient? By sending fewer messages (flat), and by avoiding one rank that all others wait for
(ring). A third way is to overlap with the backward pass, as strategy=ddp and
strategy.algorithm=bucketed do: profile=true shows how much of the communication is hidden.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from ddp_lab.exercises.speed import PROJECT, Prepare, by_size, report
from ddp_lab.strategies.contiguous import flatten
from ddp_lab.world.runtime import Runtime

NO_FIT = (
    "The model is left out: the library's largest sum took no longer than its smallest one, so no "
    "bandwidth follows from them. Raise --largest or --repeat, or use an idle machine"
)
LIBRARY: dict[str, Prepare] = {
    "library": lambda tensors: partial(dist.all_reduce, flatten(tensors))
}


def model(library: list[tuple[float, float]], ranks: int) -> list[tuple[float, float]]:
    """Return (bytes, milliseconds) of the cost model: latency + 2 (k-1)/k bytes / bandwidth.

    Neither the latency of all messages together nor the time per byte is negative, so the time
    never falls with the size.

    Args:
        library: (bytes, milliseconds) of the library; the first and the last point determine
            latency and bandwidth.
        ranks: number of ranks, k.
    """
    (small, fast) = library[0]
    (large, slow) = library[-1]
    moved = 2 * (ranks - 1) / ranks
    per_byte = max(0.0, slow - fast) / (moved * (large - small))
    latency = max(0.0, fast - moved * small * per_byte)
    return [(size, latency + moved * size * per_byte) for size, _ in library]


def has_slope(predicted: list[tuple[float, float]]) -> bool:
    """Return whether the model's time grows with the size: else no bandwidth could be derived."""
    return predicted[-1][1] > predicted[0][1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        default="runs/lab_allreduce",
        help="path of the picture without its suffix: OUT.png is written",
    )
    parser.add_argument("--largest", type=int, default=26, help="log2 of the largest size in bytes")
    parser.add_argument("--repeat", type=int, default=10)
    arguments = parser.parse_args()
    with Runtime(timeout=120) as runtime:
        if runtime.world_size == 1:
            sys.exit(
                "error: an all-reduce needs at least 2 ranks, got 1; use torchrun --standalone "
                "--nproc_per_node=2 scripts/lab_allreduce.py"
            )
        runtime.open_group()
        sizes = [2**power for power in range(12, arguments.largest + 1, 2)]
        seconds = by_size(PROJECT | LIBRARY, runtime.device, sizes, arguments.repeat)
        if runtime.rank == 0:
            picture = Path(arguments.out).with_suffix(".png")
            picture.parent.mkdir(parents=True, exist_ok=True)
            predicted = model(seconds["library"], runtime.world_size)
            fits = has_slope(predicted)
            columns = seconds | ({"model": predicted} if fits else {})
            report(columns, runtime.world_size, picture)
            if not fits:
                print(NO_FIT)


if __name__ == "__main__":
    main()
