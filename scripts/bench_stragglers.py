"""What it costs to compare the ranks (`straggler.seconds`), in steps that alternate with others.

    torchrun --standalone --nproc_per_node=2 scripts/bench_stragglers.py \
        --pairs 200 --seconds 0.6 strategy=ddp model=resnet18 data=synthetic batch_size=512

Two models are trained at the same time, in turns of some hundred steps: one whose work is timed and
exchanged, as with the default of straggler.seconds, and one without, as with null. So drift of the
machine meets both. Both exchange what concerns all ranks twice a second. Printed is the median of
the ratios of the turns' durations, with the interval in which it lies with 95 %.
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
from ddp_lab.speed.fastest import build_step  # noqa: E402
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
        is_timed: whether the ranks are compared.
    """

    def __init__(self, job: Job, is_timed: bool):
        self.job = job
        self.device = job.runtime.device
        if is_timed:
            job.strategy.time_work()
        trainer = job.trainer()
        self.step: Any = build_step(job.options, trainer.eager_step, job.loaders["train"], ENDLESS)
        self.position = Progress()
        self.batches = self.endless()
        stragglers = None
        if is_timed:
            stragglers = Stragglers(Detector(0.2, 60.0), Logger(), lambda position, named: None)
        run = SimpleNamespace(strategy=job.strategy, position=self.position, waited=0.0)
        self.sync = Sync(
            job.strategy,
            trainer.eager_step.running_sums,
            Every(),
            lambda: (False, False, False, False),
            work=stragglers,
        )
        self.sync.begin_epoch(self.position)
        if stragglers is not None:
            stragglers.on_start(cast("Run", run))

    def endless(self) -> Iterator[Any]:
        """Yield batches, epoch after epoch."""
        loader = self.job.loaders["train"]
        self.job.strategy.train()
        while True:
            loader.set_epoch(self.position.epoch)
            yield from self.step.batches(loader)
            self.position.epoch += 1

    def take(self, steps: int) -> float:
        """Take steps, and return their seconds on this rank. Collective."""
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


def ratios_of(timed: Turns, plain: Turns, pairs: int, steps: int) -> Generator[float]:
    """Yield the duration of each turn whose work is timed, in that of the turn beside it."""
    for pair in range(pairs):
        order = (timed, plain) if pair % 2 else (plain, timed)
        seconds = {turns: turns.take(steps) for turns in order}
        yield seconds[timed] / seconds[plain]


def interval(values: list[float]) -> tuple[float, float]:
    """Return the interval of the median, from the order of the values (their signs are throws)."""
    ordered = sorted(values)
    middle = len(ordered) / 2
    reach = NORMAL * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(middle - reach))
    high = min(len(ordered) - 1, math.ceil(middle + reach))
    return ordered[low], ordered[high]


def main() -> None:
    """Train both models in turns, and print what the comparison costs."""
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
    jobs = [build(cfg, runtime) for _ in range(2)]
    if not jobs[0].strategy.has_equal_work:
        raise SystemExit(f"strategy={jobs[0].strategy.name}: only the wait for batches is compared")
    with jobs[0].options.backend_flags(runtime):
        timed = Turns(jobs[0], True)
        plain = Turns(jobs[1], False)
        each = max(turns.take(20) / 20 for turns in (plain, timed, plain, timed))
        number = runtime.broadcast_from_rank0("steps", lambda: max(1, round(seconds / each)))
        list(ratios_of(timed, plain, WARM_UP, number))
        ratios = list(ratios_of(timed, plain, pairs, number))
    if runtime.is_main:
        low, high = interval(ratios)
        cost = statistics.median(ratios) - 1
        print(
            f"comparing the ranks costs {cost:+.3%} of a step ({low - 1:+.3%} to {high - 1:+.3%}, "
            f"{pairs} pairs of {count(number, 'step')} of {1000 * each:.2f} ms, "
            f"{jobs[0].strategy.where}, {jobs[0].strategy.name})"
        )


if __name__ == "__main__":
    main()
