"""Measures a pipeline's idle time against the formula (p-1)/(m+p-1).

torchrun --standalone --nproc_per_node=2 scripts/bubble.py
torchrun --standalone --nproc_per_node=4 scripts/bubble.py --schedule 1f1b --size 512

ResNet-18, float32, micro-batches of a FIXED size, so that m changes the batch and nothing else. Printed for each m: the median
time of a step; how long the busiest rank would compute without waiting for anybody (its own stage alone, m times forward and
backward, on the same GPU); and the share of the step in which that rank is idle, beside the formula's. What the ranks'
stages differ by is in "mean": the same share for the average rank.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from ddp_lab.models.resnet import resnet18
from ddp_lab.runtime import Runtime
from ddp_lab.strategies.pipeline import Pipeline


def seconds(function, device: torch.device, repeat: int) -> float:
    """Median of `repeat` calls, after three that do not count."""
    times = []
    for _ in range(repeat + 3):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def measure(runtime: Runtime, schedule: str, m: int, size: int, repeat: int) -> tuple[float, float]:
    """Seconds of a step, and of this rank's own work in it."""
    torch.manual_seed(0)
    model = resnet18(1, 28, 10, None)
    strategy = Pipeline(runtime, schedule, m, None, None)
    strategy.partition(model)
    strategy.setup(model)
    if m == 2 and runtime.rank == 0:
        print(strategy.describe())
    images = torch.randn(m * size, 1, 28, 28, device=runtime.device)
    targets = torch.randint(10, (m * size,), device=runtime.device)
    strategy.train()

    def step() -> None:
        strategy.forward_backward(images, targets, len(targets))

    def own_work() -> None:
        for index, stage in strategy.stages.items():
            shape = strategy.parts.shapes[strategy.parts.parts[index].start]
            for _ in range(m):
                inputs = torch.randn(size, *shape, device=runtime.device, requires_grad=index > 0)
                outputs = stage(inputs)
                outputs.backward(torch.ones_like(outputs))

    return seconds(step, runtime.device, repeat), seconds(own_work, runtime.device, repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="gpipe", choices=["gpipe", "1f1b"])
    parser.add_argument("--size", type=int, default=256, help="samples in a micro-batch")
    parser.add_argument("--repeat", type=int, default=10)
    arguments = parser.parse_args()
    with Runtime(timeout=120) as runtime:
        runtime.open_group()
        p = runtime.world_size
        for m in (2, 4, 8, 16):
            if arguments.schedule == "1f1b" and m < p:
                continue
            step, own = measure(runtime, arguments.schedule, m, arguments.size, arguments.repeat)
            work = torch.zeros(p, device=runtime.device)
            work[runtime.rank] = own
            dist.all_reduce(work)
            if runtime.rank == 0:
                print(
                    f"p={p} {arguments.schedule} m={m:2}: step {1000 * step:7.1f} ms, busiest rank works {1000 * work.max():7.1f} ms, "
                    f"idle {1 - work.max() / step:4.0%} (mean {1 - work.mean() / step:4.0%}), formula {(p - 1) / (m + p - 1):4.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
