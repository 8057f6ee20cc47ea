"""The parts of a run, and how they are put together. Only the room `run` and the commands read the config.

`Job` has the parts, each made when it is first read, and every mistake of the user shows while they are made; `prepare` makes
them all. `materialize` then connects the ranks and places the model. train.py, the doctor, the benchmark and the tests use the
same two functions.
"""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from omegaconf import DictConfig

from ddp_lab.config.build import build
from ddp_lab.data.datasets import Dataset
from ddp_lab.data.loaders import LOADERS
from ddp_lab.data.sharding import Loader
from ddp_lab.models.chain import Chain
from ddp_lab.observe.logger import Logger
from ddp_lab.observe.profiler import check_profile
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.hooks import Hooks
from ddp_lab.training.loop import fit
from ddp_lab.training.plan import Plan
from ddp_lab.training.progress import Progress
from ddp_lab.training.schedule import make_scheduler
from ddp_lab.training.speed.options import PerformanceOptions
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime


class Job:
    """The parts of a run that are decided before the ranks are connected.

    Each part is made when it is first read and needs only those above it, so that a command can look at them one by one
    (`ddp_lab.doctor`). Making `dataset` downloads it where it is missing.

    Raises:
        ConfigError: while a part is made: a mistake of the user.
    """

    def __init__(self, cfg: DictConfig, runtime: Runtime):
        self.cfg, self.runtime = cfg, runtime

    @cached_property
    def strategy(self) -> Strategy:
        return build(self.cfg.strategy, self.runtime)

    @cached_property
    def dataset(self) -> Dataset:
        source = build(self.cfg.data.dataset)
        self.runtime.agree("dataset", source.prepare, per_node=True)
        return source.load()

    @cached_property
    def plan(self) -> Plan:
        cfg = self.cfg
        return Plan.make(
            world_size=self.runtime.world_size,
            replicas=self.strategy.replicas,
            train_size=len(self.dataset.train.targets),
            batch_size=cfg.batch_size,
            scaling=cfg.scaling,
            accumulate=cfg.accumulate,
            lr=cfg.optimizer.lr,
            lr_scaling=cfg.lr_scaling,
            lr_base_batch_size=cfg.lr_base_batch_size,
        )

    @cached_property
    def model(self) -> Chain:
        """On the CPU, the same on every rank."""
        torch.manual_seed(self.cfg.seed)
        return build(self.cfg.model, **self.dataset.model_shape())

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole model's tensors, by name. Read it before the strategy changes the model."""
        return {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}

    def partition(self) -> None:
        """Has the strategy decide which part of the model goes where."""
        self.strategy.partition(self.model, self.plan.samples_at_once)

    @cached_property
    def loaders(self) -> tuple[Loader, Loader]:
        """Of the training set, shuffled and augmented, and of the test set."""
        data = self.cfg.data
        make = partial(
            LOADERS[data.loader],
            batch_size=self.plan.global_batch_size,
            num_workers=data.num_workers,
            dp_rank=self.strategy.dp_rank,
            dp_size=self.strategy.dp_size,
            device=self.strategy.device,
            mean=data.mean,
            std=data.std,
            seed=self.cfg.seed,
        )
        training = make(self.dataset.train, shuffle=True, shift=data.shift, flip=data.flip)
        return training, make(self.dataset.test, shuffle=False)

    @cached_property
    def options(self) -> PerformanceOptions:
        """Those asked for that are supported here; the others are named in the log."""
        wanted = PerformanceOptions(self.cfg.cuda_graph, self.cfg.compile, self.cfg.channels_last)
        return wanted.supported(self.strategy, self.cfg.data.loader)


def prepare(cfg: DictConfig, runtime: Runtime) -> Job:
    """Makes every part of a run. Opens no process group, writes nothing but a missing dataset.

    Raises:
        ConfigError: a mistake of the user.
    """
    job = Job(cfg, runtime)
    _ = job.strategy, job.dataset, job.plan
    if cfg.profile:
        check_profile(cfg.epochs * job.plan.steps_per_epoch, job.strategy.device)
    _ = job.model, job.shapes
    job.partition()
    _ = job.loaders
    return job


@dataclass
class Training:
    """A job whose model is on its devices.

    Attributes:
        step: as it is written; `compile` makes it fast.
    """

    job: Job
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    step: Step

    def compile(self) -> None:
        """Compiles and captures the step as the job's performance options say. After a resume. Collective."""
        self.step = self.job.options.build(self.step, self.job.loaders[0])

    def fit(self, logger: Logger, hooks: Hooks, progress: Progress) -> Progress:
        """Trains on from `progress` to the end of the job, and returns where it ended."""
        cfg = self.job.cfg
        return fit(self.job.strategy, self.step, *self.job.loaders, logger, hooks, progress, cfg.epochs, cfg.patience)


def materialize(job: Job) -> Training:
    """Opens the process group, places the model, and makes what trains it. Collective."""
    cfg, strategy, plan = job.cfg, job.strategy, job.plan
    if not strategy.one_process:
        job.runtime.open_group()
    strategy.setup(job.options.shape(job.model))
    optimizer = job.options.settle(build(cfg.optimizer)(strategy.param_groups(), lr=plan.lr))
    warmup_steps = round(cfg.warmup_epochs * plan.steps_per_epoch)
    scheduler = make_scheduler(optimizer, build(cfg.scheduler), cfg.epochs * plan.steps_per_epoch, warmup_steps)
    step = Step(strategy, optimizer, scheduler, cfg.accumulate, cfg.max_grad_norm, cfg.on_nan == "skip")
    return Training(job, optimizer, scheduler, step)
