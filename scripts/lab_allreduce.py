"""Lab: the cost of an all-reduce by several algorithms, compared with torch.distributed's and with the cost model.

torchrun --standalone --nproc_per_node=4 scripts/lab_allreduce.py [--out runs/lab_allreduce]

The table has the milliseconds of summing eight tensors, for increasing sizes: each algorithm of
ddp_lab/strategies/all_reduce.py, and `library`, one call of `torch.distributed.all_reduce` on all eight. The cost model of a
ring of k ranks (Patarasuk and Yuan 2009) is 2 (k-1)/k n bytes at the link's bandwidth plus 2 (k-1) times its latency. Bandwidth
and latency are derived from the library's smallest and largest call, so only the rows between them are predictions.

This is an exercise of Dive into Deep Learning, section 13.5: how can its all-reduce (star) be made more efficient? By sending
fewer messages (flat), and by avoiding one rank that all others wait for (ring). A third way is to overlap with the backward
pass, as strategy=ddp and strategy.algorithm=bucketed do: profile=true shows how much of the communication is hidden.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from ddp_lab.observe.plot import Curve, beside, curves
from ddp_lab.strategies.all_reduce import ALGORITHMS, flatten
from ddp_lab.world.runtime import Runtime

TENSORS = 8  # as many as LeNet has parameters


def milliseconds(function: Callable[[], None], device: torch.device, repeat: int) -> float:
    """Return the median time of `repeat` calls, which all ranks begin together, after two warm-up calls."""
    times = []
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


def by_size(runtime: Runtime, sizes: list[int], repeat: int) -> dict[str, list[tuple[float, float]]]:
    """Return (bytes, milliseconds) for each of the sizes, by algorithm; `library` is torch.distributed.all_reduce."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*ALGORITHMS, "library")}
    for algorithm in ALGORITHMS.values():
        algorithm([torch.ones(1000, device=runtime.device)])  # connections are opened when they are first used
    for size in sizes:
        tensors = [torch.randn(size // 4 // TENSORS, device=runtime.device) for _ in range(TENSORS)]
        flat = flatten(tensors)
        for name, algorithm in ALGORITHMS.items():
            found[name].append((size, milliseconds(lambda run=algorithm, what=tensors: run(what), runtime.device, repeat)))
        found["library"].append((size, milliseconds(lambda what=flat: dist.all_reduce(what), runtime.device, repeat)))
    return found


def model(library: list[tuple[float, float]], ranks: int) -> list[tuple[float, float]]:
    """Return the cost model: (bytes, milliseconds), with milliseconds = latency + 2 (k-1)/k bytes / bandwidth.

    Neither the latency of all messages together nor the time per byte is negative, so the time never falls with the size.

    Args:
        library: (bytes, milliseconds) of the library; the first and the last point determine latency and bandwidth.
        ranks: number of ranks, k.
    """
    (small, fast), (large, slow) = library[0], library[-1]
    moved = 2 * (ranks - 1) / ranks
    per_byte = max(0.0, slow - fast) / (moved * (large - small))
    latency = max(0.0, fast - moved * small * per_byte)
    return [(size, latency + moved * size * per_byte) for size, _ in library]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", default="runs/lab_allreduce", help="path of the picture without its suffix: OUT.png is written"
    )
    parser.add_argument("--largest", type=int, default=26, help="log2 of the largest size in bytes")
    parser.add_argument("--repeat", type=int, default=10)
    arguments = parser.parse_args()
    with Runtime(timeout=120) as runtime:
        if runtime.world_size == 1:
            sys.exit(
                "error: an all-reduce needs at least 2 ranks, got 1; use torchrun --standalone --nproc_per_node=2 "
                "scripts/lab_allreduce.py"
            )
        runtime.open_group()
        found = by_size(runtime, [2**power for power in range(12, arguments.largest + 1, 2)], arguments.repeat)
        if runtime.rank == 0:
            report(found, runtime.world_size, Path(arguments.out).with_suffix(".png"))


def report(found: dict[str, list[tuple[float, float]]], ranks: int, picture: Path) -> None:
    """Print the table and draw it."""
    found = found | {"model": model(found["library"], ranks)}
    print(f"milliseconds of a sum over {ranks} ranks, {TENSORS} tensors together")
    print(f"{'bytes':>12}" + "".join(f"{name:>12}" for name in found))
    for row, (size, _) in enumerate(found["library"]):
        print(f"{size:>12,}" + "".join(f"{points[row][1]:>12.3f}" for points in found.values()))
    lines = [Curve(name, points, dashed=name == "model") for name, points in found.items()]
    picture.parent.mkdir(parents=True, exist_ok=True)
    beside([curves(f"All-reduce over {ranks} ranks", "bytes", "ms", lines, log=True)], picture)
    print(f"\n{picture}")


if __name__ == "__main__":
    main()
