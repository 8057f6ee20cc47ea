"""What it costs to compare the ranks (`straggler.seconds`), in steps that alternate with others.

    torchrun --standalone --nproc_per_node=2 scripts/bench_stragglers.py \
        --pairs 200 --seconds 0.6 strategy=ddp model=resnet18 data=synthetic batch_size=512

One model is trained, in turns of some hundred steps: in one turn the ranks time their work and
exchange it, as with the default of straggler.seconds, and in the next one they do not. So drift of
the machine meets both. Two models would not do: of two that are trained in the same way, one was
0.3 % slower than the other, on two H200s, by where its memory lies. In all turns the ranks exchange
what concerns all of them twice a second. Printed is the median of the ratios of the turns'
durations, with the interval in which it lies with 95 %.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.config.check import check  # noqa: E402
from ddp_lab.config.errors import count  # noqa: E402
from ddp_lab.config.types import Every  # noqa: E402
from ddp_lab.launchers.command_line import compose_config  # noqa: E402
from ddp_lab.observe.logger import Logger  # noqa: E402
from ddp_lab.run.build import build  # noqa: E402
from ddp_lab.run.job import Job  # noqa: E402
from ddp_lab.speed.cuda_graph import GraphStep  # noqa: E402
from ddp_lab.speed.fastest import build_step  # noqa: E402
from ddp_lab.strategies.work_time import EventTimer  # noqa: E402
from ddp_lab.training.hooks import Run  # noqa: E402
from ddp_lab.training.progress import Progress  # noqa: E402
from ddp_lab.training.stragglers import Detector, Stragglers  # noqa: E402
from ddp_lab.training.sync import Sync  # noqa: E402
from ddp_lab.world.runtime import Runtime  # noqa: E402

WARM_UP = 3  # pairs of turns
ENDLESS = 1_000_000  # steps of a run that is long enough for every option of speed=auto
NORMAL = 1.96  # standard deviations within which 95 % of a normal distribution lie


class Turns:
    """A training that takes some steps in each of its turns.

    Args:
        job: what is trained.
    """

    def __init__(self, job: Job):
        self.job = job
        self.device = job.runtime.device
        job.strategy.time_work()
        trainer = job.trainer()
        self.step: Any = build_step(job.options, trainer.eager_step, job.loaders["train"], ENDLESS)
        self.position = Progress()
        self.batches = self.endless()
        self.timer = job.strategy.timer
        self.stragglers = Stragglers(Detector(0.2, 60.0), Logger(), lambda position, named: None)
        run = SimpleNamespace(strategy=job.strategy, position=self.position, waited=0.0)
        self.sync = Sync(
            job.strategy,
            trainer.eager_step.running_sums,
            Every(),
            lambda: (False, False, False, False),
        )
        self.sync.begin_epoch(self.position)
        self.stragglers.on_start(cast("Run", run))

    def endless(self) -> Iterator[Any]:
        """Yield batches, epoch after epoch."""
        loader = self.job.loaders["train"]
        self.job.strategy.train()
        while True:
            loader.set_epoch(self.position.epoch)
            yield from self.step.batches(loader)
            self.position.epoch += 1

    def take(self, steps: int, is_compared: bool) -> float:
        """Take steps, and return their seconds on this rank. Collective.

        Args:
            steps: their number.
            is_compared: whether the ranks time their work and exchange it.
        """
        timer = self.timer if is_compared else None
        self.job.strategy.timer = timer
        if isinstance(self.step, GraphStep):
            self.step.timer = cast("EventTimer | None", timer)
        self.sync.work = self.stragglers if is_compared else None
        wait(self.device)
        self.sync.begin(self.position)
        began = time.perf_counter()
        for _ in range(steps):
            self.step(next(self.batches))
            self.position.step += 1
            if self.position.step >= self.sync.next:
                self.sync.after_step(self.position, 0.0)
        wait(self.device)
        return time.perf_counter() - began


def wait(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ratios_of(turns: Turns, pairs: int, steps: int) -> Generator[float]:
    """Yield the duration of each turn with a comparison, in that of the turn beside it."""
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        seconds = {is_compared: turns.take(steps, is_compared) for is_compared in order}
        yield seconds[True] / seconds[False]


def interval(values: list[float]) -> tuple[float, float]:
    """Return the interval of the median, from the order of the values (their signs are throws)."""
    ordered = sorted(values)
    middle = len(ordered) / 2
    reach = NORMAL * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(middle - reach))
    high = min(len(ordered) - 1, math.ceil(middle + reach))
    return ordered[low], ordered[high]


def main() -> None:
    """Train in turns, and print what the comparison costs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=200, help="pairs of turns")
    parser.add_argument("--seconds", type=float, default=0.6, help="of a turn")
    arguments, overrides = parser.parse_known_args()
    cfg = compose_config(overrides, None)
    check(cfg)
    with Runtime(cfg.device, cfg.precision, cfg.timeout) as runtime:
        measure(cfg, runtime, arguments.pairs, arguments.seconds)


def measure(cfg: Any, runtime: Runtime, pairs: int, seconds: float) -> None:
    """Measure with a config, and print the result on rank 0. Collective."""
    job = build(cfg, runtime)
    if not job.strategy.has_equal_work:
        raise SystemExit(f"strategy={job.strategy.name}: only the wait for batches is compared")
    with job.options.backend_flags(runtime):
        turns = Turns(job)
        each = max(turns.take(20, is_compared) / 20 for is_compared in (False, True) * 2)
        number = runtime.broadcast_from_rank0("steps", lambda: max(1, round(seconds / each)))
        list(ratios_of(turns, WARM_UP, number))
        ratios = list(ratios_of(turns, pairs, number))
    if runtime.is_main:
        low, high = interval(ratios)
        cost = statistics.median(ratios) - 1
        print(
            f"comparing the ranks costs {cost:+.3%} of a step ({low - 1:+.3%} to {high - 1:+.3%}, "
            f"{pairs} pairs of {count(number, 'step')} of {1000 * each:.2f} ms, "
            f"{job.strategy.where}, {job.strategy.name})"
        )


if __name__ == "__main__":
    main()
