"""What a run consists of: values and objects, of which none knows the config."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from ddp_lab.config.schema import StragglerConfig
from ddp_lab.data.dataset import Dataset
from ddp_lab.data.loader import Loader
from ddp_lab.strategies.base import Strategy
from ddp_lab.tasks.base import Task
from ddp_lab.training.hooks import lower_is_better
from ddp_lab.training.performance import PerformanceOptions
from ddp_lab.training.plan import FitSettings, TrainSizes
from ddp_lab.training.progress import Criterion
from ddp_lab.training.schedule import Horizon
from ddp_lab.training.trainer import Recipe, Trainer
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:
    from ddp_lab.launchers.preflight import Finding
    from ddp_lab.observe.trackers.base import MakeTracker
    from ddp_lab.training.callbacks import Callback
    from ddp_lab.training.gathered_metrics import GatheredMetrics


@dataclass(frozen=True)
class CheckpointSettings:
    """The values of the config group `checkpoint`; `best` is None if the last weights are it."""

    every_epochs: int
    every_steps: int | None
    every_minutes: float | None
    at_steps: Sequence[int]
    keep: int
    best: Criterion | None
    on_error: Literal["stop", "continue"]
    format: Literal["auto", "full", "sharded"]
    mirror: str | None


@dataclass(frozen=True)
class RunSettings:
    """Where a run is recorded, and what protects it: what concerns neither its model nor its steps.

    Attributes:
        runs_dir, name, resume, on_nan, check_replicas, inject, profile, timeout, float32_matmul:
            the keys of the config.
        label: the beginning of the name of a run without one.
        title: of the log.
        source: what the run resumes from, as from `find_source`; None: it begins.
        findings: of the preflight checks.
        checkpoint: when checkpoints are written.
        straggler: when a slow rank is named.
        config: the config, as the run directory records it.
        tracked: the config as trackers get it, without secrets.
        hparams: of it what trackers compare runs by.
        trackers: the chosen ones, by name.
    """

    runs_dir: Path
    name: str | None
    resume: str
    label: str
    title: str
    source: Path | None
    findings: "list[Finding]"
    checkpoint: CheckpointSettings
    straggler: StragglerConfig
    on_nan: Literal["stop", "skip"]
    check_replicas: int | None
    inject: str | None
    profile: bool
    timeout: float
    float32_matmul: Literal["highest", "high"]
    config: str
    tracked: Mapping[str, Any]
    hparams: Mapping[str, Any]
    trackers: "Mapping[str, MakeTracker]"


@dataclass(frozen=True)
class Job:
    """What a run consists of before its ranks are connected.

    Attributes:
        strategy: after `partition`, before `setup`.
        dataset: the sets of samples; of a planned run only their sizes.
        sizes: batch sizes, steps per epoch and learning rate.
        model: the complete model on the CPU, the same on every rank; on the meta device with
            model.init=by_block.
        task: what the model is trained for, with its loss, on the CPU.
        recipe: how the weights are updated, and how a step is executed.
        fit_settings: when training ends, and when the test set is evaluated.
        shape: the shape of the learning-rate schedule.
        horizon: its end.
        shapes: the shape of each tensor of the unsharded model, by name.
        checkpoint_bytes: the size of a checkpoint.
        notes: lines for the log.
        loaders: of the sets of the dataset, by name; none for a planned run.
        settings: of the run; None if it is not trained.
        callbacks: of the key `callbacks`, as hooks.
        metrics: of evaluations, besides those of the task; None: there are none.
    """

    strategy: Strategy
    dataset: Dataset
    sizes: TrainSizes
    model: nn.Module
    task: Task
    recipe: Recipe
    fit_settings: FitSettings
    shape: Callable[..., float]
    horizon: Horizon
    shapes: dict[str, tuple[int, ...]]
    checkpoint_bytes: int
    notes: list[str]
    loaders: Mapping[str, Loader] = field(default_factory=dict[str, Loader])
    settings: RunSettings | None = None
    metrics: "GatheredMetrics | None" = None
    callbacks: "Sequence[Callback]" = ()

    @property
    def runtime(self) -> Runtime:
        """This rank and the others."""
        return self.strategy.runtime

    @property
    def options(self) -> PerformanceOptions:
        """The performance options: of the config, as far as supported, and of speed=auto."""
        return self.recipe.performance

    @property
    def compares_ranks(self) -> bool:
        """Whether ranks that are slower than the others are named."""
        is_wanted = self.settings is not None and self.settings.straggler.seconds is not None
        return is_wanted and self.runtime.world_size > 1

    def lower_is_better(self, metric: str) -> bool:
        """Return whether lower values of a metric, such as loss, are better."""
        return lower_is_better(metric, self.task, self.metrics)

    def full_rate(self) -> float | None:
        """Return the samples per second at the peak of the devices' data sheet; None: unknown.

        Call it before `trainer`, which cuts the model.
        """
        peak = self.runtime.peak_flops()
        if not peak:
            return None
        from ddp_lab.models.trial import count_flops, random_like

        flops = count_flops(self.model, random_like(self.dataset.train.example(2)[0]))
        return self.strategy.num_devices * peak / flops if flops else None

    def trainer(self) -> Trainer:
        """Connect the ranks, and place the model on its devices with optimizer, schedule and step.

        Collective, once.
        """
        return Trainer(self.strategy, self.model, self.task, self.recipe)
