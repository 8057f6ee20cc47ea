"""The construction of a run from its config.

What the config names is built here, and everything else gets values.

    cfg -> strategy -> dataset -> sizes -> task, model -> partition, performance options -> loaders
    -> settings

`prepare` is this path, with the checks of everything that can be refused before a directory is
created; the planner and the doctor use its parts, in the same order. The parts that are more than
a call have a file each:

    build_data.py      the dataset and its loaders
    build_model.py     the model and what it is trained for
    build_settings.py  where the run is recorded, and what it resumes from
    build_trained.py   a trained run, from its directory

Below these files nothing knows the config.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ddp_lab.checkpoints.state import checkpoint_bytes
from ddp_lab.config.build import build_optimizer, construct, plain
from ddp_lab.config.types import Every
from ddp_lab.data.dataset import Dataset, InMemory
from ddp_lab.models import make as models
from ddp_lab.models.make import BuiltModel
from ddp_lab.observe.log import print_if_slow
from ddp_lab.run.build_data import load_dataset, make_loaders
from ddp_lab.run.build_model import make_task, model_spec
from ddp_lab.run.build_settings import (
    check_job,
    check_selection,
    criterion,
    find_resumed,
    left_out,
    make_settings,
)
from ddp_lab.run.job import Job
from ddp_lab.strategies.base import Strategy
from ddp_lab.tasks.base import Task
from ddp_lab.tasks.classification import Classification, require_classes
from ddp_lab.training.performance import (
    AUTO,
    KEYS,
    PerformanceOptions,
    Wanted,
    excluded_by,
    plain_options,
)
from ddp_lab.training.plan import FitSettings, StepLimit, TrainSizes, step_limits
from ddp_lab.training.schedule import (
    Horizon,
    ShapeByMetric,
    by_epoch,
    make_scheduler,
    try_shape,
)
from ddp_lab.training.step import StepOptions
from ddp_lab.training.trainer import Recipe
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:
    from ddp_lab.data.augment import Mix
    from ddp_lab.launchers.preflight import Finding
    from ddp_lab.training.callbacks import Callback
    from ddp_lab.training.divided_loss import Division
    from ddp_lab.training.gathered_metrics import GatheredMetrics
    from ddp_lab.training.groups import ParameterGroups


def prepare(
    cfg: DictConfig, runtime: Runtime, notes: Sequence[str] = (), dataset: Dataset | None = None
) -> Job:
    """Construct a run and check everything that can be checked before its directory is created.

    Collective.

    Args:
        cfg: the config, in which no value is left to be chosen by memory.
        runtime: the ranks.
        notes: lines for the log about what was chosen.
        dataset: as for `build`.

    Raises:
        ConfigError: the config cannot be used, or a machine cannot take part in the run.
    """
    findings: list[Finding] = []
    if runtime.world_size > 1:
        from ddp_lab.launchers.preflight import check_network

        findings = check_network(runtime)
    source = find_resumed(cfg, runtime)
    job = build(cfg, runtime, with_weights=source is None, dataset=dataset)
    job.notes[:0] = [*notes, *left_out(cfg)]
    by_metric = job.shape.metric if isinstance(job.shape, ShapeByMetric) else None
    check_selection(cfg, job, by_metric)
    if cfg.profile:
        from ddp_lab.training.profiler import check_profile

        check_profile(job.horizon.steps, job.strategy.device)
    settings = make_settings(cfg, job, source, findings)
    check_job(job, settings)
    return replace(job, settings=settings, callbacks=make_callbacks(cfg))


def build(
    cfg: DictConfig, runtime: Runtime, with_weights: bool = True, dataset: Dataset | None = None
) -> Job:
    """Construct a run.

    Collective. It does not open the process group and writes nothing but missing downloads.

    Args:
        cfg: the config, checked.
        runtime: the ranks.
        with_weights: whether to load the file `model.weights`, which a run that resumes from a
            checkpoint does not need.
        dataset: what to train on, the same on all ranks; None: what the config names.

    Raises:
        ConfigError: a value of the config is not allowed with this model, dataset, strategy, device
            or number of ranks.
    """
    strategy = construct("strategy", cfg.strategy, runtime)
    dataset = dataset or load_dataset(cfg, runtime)
    sizes = make_sizes(cfg, strategy, dataset)
    task = make_task(cfg, dataset)
    spec = model_spec(cfg.model, dataset.model_shape())
    if isinstance(task, Classification):
        require_classes(dataset)

    trial = None
    if not (spec.is_own and isinstance(task, Classification)):
        from ddp_lab.run.model_trial import make_trial

        trial = make_trial(dataset, task, freezes=not strategy.may_leave_unused)
    built = models.make_model(spec, runtime, cfg.seed, trial, with_weights)
    is_divided = (strategy.replicas, cfg.accumulate, strategy.num_microbatches) != (1, 1, 1)
    if is_divided or cfg.loss_over_batch:
        from ddp_lab.tasks.over_batch import is_own
        from ddp_lab.training.divided_loss import Division

        division = Division(strategy, sizes.global_batch_size, cfg.accumulate)
        is_known = spec.is_own and is_own(task)
        built.notes.extend(check_division(cfg, division, dataset, built.model, task, is_known))
    job = assemble(cfg, strategy, dataset, sizes, built, task)
    job = replace(
        job, loaders=make_loaders(cfg, job), metrics=make_metrics(cfg, sizes.global_batch_size)
    )
    job.notes.extend(job.loaders["train"].notes())
    return job


def check_division(
    cfg: DictConfig,
    division: "Division",
    dataset: Dataset,
    model: nn.Module,
    task: Task,
    is_known: bool,
) -> list[str]:
    """Check that the loss may be divided; return notes on what the parts of a batch change.

    Args:
        cfg: the config.
        division: of the global batch.
        dataset: of which some samples are read if the loss or the model is tried.
        model: the complete model.
        task: with the loss, on the CPU.
        is_known: whether model and loss are those of ddp_lab, of which only BatchNorm mixes the
            samples of a batch.

    Raises:
        ConfigError: the loss is over the batch.
    """
    from ddp_lab.run.loss_check import check_divided_loss, describe_divided_model
    from ddp_lab.training.divided_model import describe_batch_norm

    is_main = division.strategy.runtime.is_main
    group = "task" if task.loss is None else "loss"
    key = f"{group}._target_={cfg[group]['_target_']}"
    with print_if_slow("checking whether the loss can be divided", is_main):
        notes = check_divided_loss(cfg.loss_over_batch, division, dataset, model, task, key)
    notes += describe_batch_norm(division, model)
    if not is_known:
        with print_if_slow("trying what the parts of a batch compute", is_main):
            notes += describe_divided_model(division, dataset, model, task)
    return notes


def make_metrics(cfg: DictConfig, batch_size: int) -> "GatheredMetrics | None":
    """Return the metrics of the key `metrics`; None if there are none.

    Args:
        cfg: the config.
        batch_size: samples in a GLOBAL batch.

    Raises:
        ConfigError: as `gathered_metrics.make_metrics`.
    """
    if not cfg.get("metrics"):  # a config that an older version has recorded lacks the key
        return None
    from ddp_lab.training import gathered_metrics

    return gathered_metrics.make_metrics(plain(cfg)["metrics"], batch_size)


def make_callbacks(cfg: DictConfig) -> "list[Callback]":
    """Return the hooks of the key `callbacks`.

    Raises:
        ConfigError: as `callbacks.make_callbacks`.
    """
    if not cfg.get("callbacks"):
        return []
    from ddp_lab.training import callbacks

    return callbacks.make_callbacks(plain(cfg)["callbacks"])


def make_sizes(cfg: DictConfig, strategy: Strategy, dataset: Dataset) -> TrainSizes:
    """Return the batch sizes, steps per epoch and learning rate."""
    keys = ("batch_size", "scaling", "accumulate", "lr_scaling", "lr_base_batch_size")
    values = {key: cfg[key] for key in keys}
    world_size = strategy.runtime.world_size
    return TrainSizes.make(
        values, cfg.optimizer.lr, world_size, strategy.replicas, dataset.train.size
    )


def assemble(
    cfg: DictConfig,
    strategy: Strategy,
    dataset: Dataset,
    sizes: TrainSizes,
    built: BuiltModel,
    task: Task,
) -> Job:
    """Let the strategy decide who has which part of the model, and return the job without loaders.

    Collective on GPUs.

    The arguments are constructed as in `build`; the planner has another model and only the sizes of
    the dataset.

    Raises:
        ConfigError: the model, the batch or the loss is not supported.
    """
    schedule = make_schedule(cfg, sizes, dataset.model_shape().get("context"))
    notes: list[str] = []
    if dataset.train.is_endless:
        from ddp_lab.run.stream import check_keys

        notes = check_keys(plain(cfg), schedule.shape)
    optimizer = partial(build_optimizer(cfg.optimizer), lr=sizes.lr)
    model = built.model
    groups = find_groups(cfg, model, sizes.lr)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    size = checkpoint_bytes(optimizer, model, cfg.ema is not None)

    example, _ = dataset.train.example(2, "meta")
    strategy.expect(
        example=example,
        sample=partial(dataset.train.first_inputs, 2),
        idle=built.unused,
        checkpoint_activations=cfg.checkpoint_activations,
        initial_weights=built.initial_weights,
        unsupported=excluded_by(dataset.train),
    )
    if task.head_chunks > 1:
        from ddp_lab.strategies.head_losses import check_head

        check_head(strategy, model, task)
    with print_if_slow(f"strategy={strategy.name}: dividing the model", strategy.runtime.is_main):
        strategy.partition(model, sizes.samples_at_once)

    options = find_performance(cfg, strategy, dataset, model)
    mix = make_mix(cfg, strategy, dataset, sizes)
    step = StepOptions(cfg.accumulate, cfg.max_grad_norm, cfg.on_nan == "skip", mix, seed=cfg.seed)
    recipe = Recipe(
        batch_size=sizes.global_batch_size,
        optimizer=optimizer,
        scheduler=schedule.make,
        step=step,
        ema=cfg.ema,
        ema_warmup=cfg.ema_warmup,
        decay_norms_and_biases=cfg.decay_norms_and_biases,
        performance=options,
        groups=groups,
    )
    return Job(
        strategy=strategy,
        dataset=dataset,
        sizes=sizes,
        model=model,
        task=task,
        recipe=recipe,
        fit_settings=make_fit_settings(cfg, schedule.limits, dataset),
        shape=schedule.shape,
        horizon=schedule.horizon,
        shapes=shapes,
        checkpoint_bytes=size,
        notes=[*notes, *built.notes, *(groups.notes if groups else ()), *options.disabled],
    )


def find_groups(cfg: DictConfig, model: nn.Module, lr: float) -> "ParameterGroups | None":
    """Return the groups of the parameters by their names; None if there is only one.

    Args:
        cfg: the config.
        model: the complete model.
        lr: learning rate of the run.

    Raises:
        ConfigError: as `groups.make_groups`.
    """
    node = plain(cfg.optimizer)
    entries = node.get("groups") or []
    layer_decay = node.get("layer_decay")
    optimizer_class = get_object(node["_target_"])
    if not entries and layer_decay is None and not hasattr(optimizer_class, "default_groups"):
        return None
    from ddp_lab.training.default_group import DefaultGroup
    from ddp_lab.training.groups import make_groups

    return make_groups(model, entries, layer_decay, lr, DefaultGroup.of(optimizer_class, model))


class Schedule(NamedTuple):
    """When a run ends, and its learning rate until then.

    Attributes:
        limits: of the steps.
        horizon: the end that the learning rate is scheduled for.
        shape: of the schedule.
        make: returns the schedule of an optimizer.
    """

    limits: tuple[StepLimit, ...]
    horizon: Horizon
    shape: Callable[..., float]
    make: Callable[[torch.optim.Optimizer], LambdaLR]


def make_schedule(cfg: DictConfig, sizes: TrainSizes, context: int | None) -> Schedule:
    """Return the schedule of a run.

    Args:
        cfg: the config.
        sizes: of the batches.
        context: tokens of a sample; None: samples are no texts.

    Raises:
        ConfigError: the warm-up or the shape is not possible.
    """
    steps = sizes.steps_per_epoch
    limits = step_limits(cfg.get("max_steps"), cfg.get("max_tokens"), context, sizes)
    by_steps = [limit.steps for limit in limits if not limit.of_samples]
    by_samples = [limit.steps for limit in limits if limit.of_samples]
    if cfg.epochs is not None:
        by_samples.append(cfg.epochs * steps)
    warmup_steps = cfg.get("warmup_steps")
    horizon = Horizon(
        min(by_steps, default=None),
        min(by_samples, default=None),
        round(cfg.warmup_epochs * steps) if warmup_steps is None else warmup_steps,
    )
    if warmup_steps is not None:  # a recipe with epochs of warm-up may be tried for a few steps
        horizon.check_warmup()

    epochs = 1.0 if horizon.steps is None else horizon.steps / steps
    shape = build_shape(cfg.scheduler, epochs)
    horizon.counts_epochs = by_epoch(shape)
    make = partial(make_scheduler, shape=shape, horizon=horizon, steps_per_epoch=steps)
    return Schedule(limits, horizon, shape, make)


def make_fit_settings(
    cfg: DictConfig, limits: tuple[StepLimit, ...], dataset: Dataset
) -> FitSettings:
    """Return when a run ends, evaluates and records."""
    return FitSettings(
        cfg.epochs,
        cfg.patience,
        cfg.evaluate_test,
        criterion(cfg, dataset) or "val_loss",
        Every.parse(cfg.log_every) or Every(),
        limits=limits,
        max_minutes=cfg.get("max_minutes"),
        evaluate_every=cfg.get("evaluate_every"),
    )


def make_mix(
    cfg: DictConfig, strategy: Strategy, dataset: Dataset, sizes: TrainSizes
) -> "Mix | None":
    """Return what mixes the images of a batch; None if the config asks for neither kind."""
    if cfg.mixup == 0 and cfg.cutmix == 0:
        return None
    from ddp_lab.data.augment import Mix

    shape = dataset.model_shape()
    return Mix(
        mixup=cfg.mixup,
        cutmix=cfg.cutmix,
        batch_size=sizes.global_batch_size,
        dp_size=strategy.dp_size,
        image_size=shape["image_size"],
        num_classes=shape["num_classes"],
        seed=cfg.seed,
    )


def build_shape(node: DictConfig | dict[str, Any], epochs: float) -> Callable[..., float]:
    """Construct the shape of a schedule that `_target_` names, and try it over the run's epochs.

    Args:
        node: the config group `scheduler`.
        epochs: epochs of the run.

    Raises:
        ConfigError: the shape cannot be constructed, fails, or does not return a number.
    """
    shape = construct("scheduler", node)
    try_shape(shape, str(node["_target_"]), epochs)
    return shape


def find_performance(
    cfg: DictConfig, strategy: Strategy, dataset: Dataset, model: nn.Module
) -> PerformanceOptions:
    """Return the performance options of a run.

    Collective with speed=auto on GPUs. Arguments as in `find_options`.
    """
    wanted = wanted_options(cfg)
    is_automatic = wanted.speed == AUTO and strategy.device.type == "cuda"
    if wanted.is_plain and not is_automatic:
        in_memory = all(isinstance(samples, InMemory) for samples in dataset.sets.values())
        return plain_options(wanted, in_memory)
    from ddp_lab.run.speed import find_options

    return find_options(wanted, strategy, dataset, model)


def wanted_options(cfg: DictConfig) -> Wanted:
    """Return what the config says about performance."""
    options = {name: OmegaConf.select(cfg, key) for name, key in KEYS.items()}
    target = str(cfg.optimizer["_target_"])
    return Wanted(cfg.speed, options, get_object(target), target)
