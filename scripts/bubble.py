"""Measure a pipeline's idle time and compare it with the formula (p-1)/(m+p-1).

torchrun --standalone --nproc_per_node=2 scripts/bubble.py --cut layer2_0
torchrun --standalone --nproc_per_node=4 scripts/bubble.py --schedule 1f1b --cut layer1_1 layer2_0 layer3_0

The model is ResNet-18 in float32. Micro-batches have a FIXED size, so m changes the size of the batch and nothing else. For
each m the script prints the median time of a step, the work of the busiest and of the average rank (m forward and backward
passes of the rank's own stages alone, on the same GPU), and the idle fraction 1 - work / step. The formula assumes stages that
take equally long.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from ddp_lab.models.resnet import resnet18
from ddp_lab.strategies.pipeline import Pipeline
from ddp_lab.world.runtime import Runtime


def seconds(function: Callable[[], None], device: torch.device, repeat: int) -> float:
    """Return the median time of `repeat` calls, after three warm-up calls."""
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


def measure(runtime: Runtime, arguments: argparse.Namespace, m: int) -> tuple[float, float]:
    """Return the seconds of a step with `m` micro-batches, and of this rank's own work in it."""
    size, repeat = arguments.size, arguments.repeat
    torch.manual_seed(0)
    model = resnet18(1, 28, 10, None)
    strategy = Pipeline(runtime, arguments.schedule, m, None, arguments.cut)
    strategy.partition(model, m * size)
    strategy.setup(model)
    if runtime.rank == 0:
        print(strategy.describe().splitlines()[0])
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
    parser.add_argument("--size", type=int, default=512, help="samples in a micro-batch")
    parser.add_argument(
        "--cut", nargs="*", help="names of the blocks that begin the second stage, the third and so on; default: cut by FLOPs"
    )
    parser.add_argument("--repeat", type=int, default=10)
    arguments = parser.parse_args()
    with Runtime(timeout=120) as runtime:
        runtime.open_group()
        p = runtime.world_size
        for m in (2, 4, 8, 16):
            if arguments.schedule == "1f1b" and m < p:
                continue
            step, own = measure(runtime, arguments, m)
            work = torch.zeros(p, device=runtime.device)
            work[runtime.rank] = own
            work = runtime.all_reduce(work).tolist()
            if runtime.rank == 0:
                mean = statistics.mean(work)
                print(
                    f"p={p} {arguments.schedule} m={m:2}: step {1000 * step:6.1f} ms; work {1000 * max(work):6.1f} ms on the "
                    f"busiest rank, {1000 * mean:6.1f} the mean; idle {1 - max(work) / step:4.0%} and {1 - mean / step:4.0%}; "
                    f"formula {(p - 1) / (m + p - 1):4.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
