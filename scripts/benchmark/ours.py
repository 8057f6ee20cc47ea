"""Our loop, as train.py runs it: alone, in turns with the bare loop, and the captured step of `ours` without the loop."""

import copy
import math
import time
from argparse import Namespace
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from benchmark.plain import LR, bare, repeated, wait
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from ddp_lab.launch.command_line import CONF
from ddp_lab.observe.logger import Logger
from ddp_lab.resilience.decisions import Decisions
from ddp_lab.resilience.guard import Guard, GuardSettings
from ddp_lab.resilience.run_directory import RunDir
from ddp_lab.resilience.watchdog import Watchdog
from ddp_lab.run.job import Job, prepare
from ddp_lab.run.materialize import Training, materialize
from ddp_lab.training.loop import train_epoch
from ddp_lab.training.progress import Progress
from ddp_lab.training.speed.cuda_graph import GraphStep
from ddp_lab.world.runtime import Runtime

EAGER, AUTO = ["speed=off"], ["speed=auto"]
FASTEST = ["cuda_graph=true", "compile=true", "channels_last=true", "precision=bf16"]
ON_GPU = {"ours eager": EAGER, "ours auto": AUTO, "ours auto bf16": [*AUTO, "precision=bf16"], "ours": FASTEST}
ON_CPU = dict.fromkeys(ON_GPU, EAGER) | {"ours": ["compile=true"]}
WARM_UP = 2  # turns that do not count

Step = Callable[[], None]


def make_job(name: str, runtime: Runtime, arguments: Namespace, performance: list[str]) -> Job:
    """Return the job of train.py on made-up images; `arguments.strategy` may be scratch-ALGORITHM."""
    strategy, _, algorithm = (arguments.strategy if runtime.world_size > 1 else "single").partition("-")
    overrides = [
        *("data=synthetic", "data.dataset.channels=1", "data.dataset.test_size=64"),
        f"data.dataset.train_size={arguments.batch * runtime.world_size * arguments.steps}",
        *(f"batch_size={arguments.batch}", "scaling=weak", f"epochs={arguments.repeats + 1}", f"timeout={arguments.patience}"),
        *(f"model={name}", "model.init_std=null", f"optimizer.lr={LR}", "scheduler=constant", f"strategy={strategy}"),
        *([f"strategy.algorithm={algorithm}"] if algorithm else []),
        *performance,
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides)
    OmegaConf.resolve(cfg)
    runtime.precision = cfg.precision
    return prepare(cfg, runtime)


@contextmanager
def guarded(job: Job, arguments: Namespace, kind: type[Guard] = Guard) -> Generator[tuple[Training, Guard]]:
    """Yield the training and the hooks of a job, as train.py makes them, but for checkpoints."""
    runtime = job.runtime
    run_dir = RunDir(runtime, Path(arguments.json).parent, "run", "auto", "run")
    with job.options.switches(runtime), Watchdog(run_dir, runtime, arguments.patience) as watchdog:
        training = materialize(job)
        training.compile((arguments.repeats + 1) * arguments.steps)
        settings = GuardSettings(1, None, "stop", "stop", None)
        no_checkpoints: Any = SimpleNamespace(problem=None)
        start = Progress()
        yield training, kind(settings, job.strategy, no_checkpoints, Decisions(runtime), watchdog, start, training.step.tally)


def train(training: Training, guard: Guard, epochs: float) -> list[float]:
    """Train for some epochs without evaluations, and return the seconds of each."""
    progress, seconds = Progress(), list[float]()
    while len(seconds) < epochs:
        job = training.job
        progress = train_epoch(job.strategy, training.step, job.loaders["train"], Logger(), guard, progress, job.cfg.epochs)
        seconds.append(progress.seconds)
        progress = progress.next_epoch({})
    return seconds


def ours(name: str, runtime: Runtime, arguments: Namespace, performance: list[str]) -> list[float]:
    """Return images per second of every epoch but the first."""
    with guarded(make_job(name, runtime, arguments, performance), arguments) as (training, guard):
        samples = arguments.batch * runtime.world_size * arguments.steps
        return [samples / seconds for seconds in train(training, guard, arguments.repeats + 1)[1:]]


class Over(Exception):
    """The time of a measurement is over."""


class Turns(Guard):
    """Hooks that run as many steps of another loop after every `turn` steps of ours, and measure both.

    Attributes:
        pairs: seconds of our steps and of the other's, then the same in CPU time.
    """

    def begin(self, other: Step, turn: int, seconds: float) -> None:
        """Begin to measure, for about so many seconds."""
        self.other, self.turn, self.end = other, turn, time.monotonic() + seconds
        self.pairs: list[tuple[float, float, float, float]] = []
        self.clocks = 0.0, 0.0
        self.passed()

    def passed(self) -> tuple[float, float]:
        """Return the seconds and the CPU time since the last call."""
        wait(self.strategy.device)
        before, self.clocks = self.clocks, (time.perf_counter(), time.process_time())
        return self.clocks[0] - before[0], self.clocks[1] - before[1]

    def after_step(self, progress: Progress, here: Callable[[], Progress]) -> None:
        super().after_step(progress, here)
        if progress.step % self.turn == 0:
            mine = self.passed()
            for _ in range(self.turn):
                self.other()
            others = self.passed()
            self.pairs.append((mine[0], others[0], mine[1], others[1]))
            over = torch.tensor([float(time.monotonic() > self.end)], device=self.strategy.device)
            if self.strategy.total(over).item():  # on any rank, so that all end after the same turn
                raise Over
            self.passed()


def turns(name: str, runtime: Runtime, arguments: Namespace) -> list[tuple[float, float, float, float]]:
    """Train eagerly in turns with `bare`, from the same weights, and return the pairs of `Turns`."""
    job = make_job(name, runtime, arguments, EAGER)
    other = bare(copy.deepcopy(job.model), runtime, arguments)
    with guarded(job, arguments, Turns) as (training, guard):
        assert isinstance(guard, Turns)
        guard.begin(other, arguments.turn, arguments.seconds)
        try:
            train(training, guard, math.inf)
        except Over:
            return guard.pairs[WARM_UP:]


def kernels(name: str, runtime: Runtime, arguments: Namespace) -> Generator[float]:
    """Replay the captured step of `ours` on the first batches, and yield images per second."""
    job = make_job(name, runtime, arguments, FASTEST)
    with job.options.switches(runtime):
        training = materialize(job)
        training.compile(arguments.steps)
        loader, step = job.loaders["train"], training.step
        assert isinstance(step, GraphStep)
        loader.start_epoch()
        for rate in repeated(next(iter(step.graphs.values())).replay, arguments, runtime):
            loader.start_epoch()
            yield rate
