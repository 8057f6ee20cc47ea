"""From a prepared job to a training: the ranks are connected, and model, optimizer, schedule and step are on the devices."""

from dataclasses import dataclass
from typing import cast

import torch

from ddp_lab.models.drop_path import DropPaths
from ddp_lab.observe.logger import Logger
from ddp_lab.run.job import Job
from ddp_lab.speed.cuda_graph import GraphStep
from ddp_lab.speed.fastest import build_step
from ddp_lab.speed.options import configure_optimizer
from ddp_lab.training.ema import EMA
from ddp_lab.training.loop import Hooks, Parts, fit
from ddp_lab.training.optimizer import param_groups
from ddp_lab.training.progress import Progress
from ddp_lab.training.schedule import make_scheduler
from ddp_lab.training.step import Step, StepOptions, TrainStep


@dataclass
class Training:
    """A job whose model is on its devices, with the optimizer, the schedule and the step.

    Attributes:
        eager_step: The training step in eager mode.
        ema: The averages of the weights; None without the key `ema`.
        step: The step that `fit` takes: `eager_step` until `compile` replaces it.
    """

    job: Job
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    eager_step: Step
    step: TrainStep
    ema: EMA | None = None

    def compile(self, steps_left: int) -> Step | GraphStep:
        """Compile and capture the step as the performance options require, and return it. Collective; called after resuming.

        Args:
            steps_left: steps until the end of the run.
        """
        job = self.job
        step = build_step(job.options, self.eager_step, job.loaders["train"], steps_left)
        # A GraphStep takes the batches of a DeviceLoader only; `options` disables cuda_graph for any other loader.
        self.step = cast("TrainStep", step)
        return step

    def fit(self, logger: Logger, hooks: Hooks, progress: Progress) -> Progress:
        """Train from `progress` to the end of the run, and return the final progress."""
        job = self.job
        return fit(Parts(job.strategy, self.step, job.loaders, job.fit_settings, self.ema), logger, hooks, progress)


def place(job: Job) -> None:
    """Open the process group and place the model and the loss on their devices. Collective."""
    strategy = job.strategy
    if not strategy.one_process:
        job.runtime.open_group()
    strategy.task = job.task.to(strategy.device)
    strategy.initial_weights = job.built.initial_weights
    strategy.setup(job.options.apply_memory_format(job.model))
    if strategy.initial_weights is not None:
        strategy.initial_weights.set_weights({})  # the tensors of a file are not needed any more


def materialize(job: Job) -> Training:
    """Place the model on its devices, and construct optimizer, schedule and step. Collective."""
    recipe, strategy, plan = job.recipe, job.strategy, job.plan
    place(job)
    groups = param_groups(strategy.parameters(), recipe.decay_norms_and_biases)
    optimizer = configure_optimizer(job.optimizer(groups, lr=plan.lr), job.options, strategy.device)
    warmup_steps = round(recipe.warmup_epochs * plan.steps_per_epoch)
    scheduler = make_scheduler(optimizer, job.schedule, job.fit_settings.epochs, plan.steps_per_epoch, warmup_steps)
    ema = None if recipe.ema is None else EMA(strategy, recipe.ema)
    mix = job.mix and job.mix.to(strategy.device)
    drop_paths = DropPaths(strategy.module.modules(), recipe.seed)
    options = StepOptions(recipe.accumulate, recipe.max_grad_norm, recipe.on_nan == "skip", mix, drop_paths, recipe.seed)
    step = Step(strategy, optimizer, scheduler, options, ema)
    return Training(job, optimizer, scheduler, step, step, ema)
