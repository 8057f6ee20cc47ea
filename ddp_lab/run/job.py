"""Construction of a run: from the config to everything that is known before the ranks are connected.

    cfg -> strategy -> dataset -> plan -> model -> loss, partition, performance options -> loaders

`build` is this path. The planner and the doctor use its parts, in the same order. `Job.trainer` then connects the ranks and
places the model on its devices. Only the subpackage `run` and the commands read the config: a Job holds values.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ddp_lab.config.build import build as instantiate
from ddp_lab.config.build import construct
from ddp_lab.config.errors import ConfigError
from ddp_lab.config.types import Every
from ddp_lab.data.augment import Mix
from ddp_lab.data.batch import LoaderOptions
from ddp_lab.data.dataset import Dataset, hold_out
from ddp_lab.data.loader import DeviceLoader, Loader
from ddp_lab.data.sources import check_same, make_source
from ddp_lab.data.workers import WorkerLoader
from ddp_lab.models.make import BuiltModel, key_of, make_model, require_chain
from ddp_lab.models.trial import Trial, check_logits, count_flops, random_like
from ddp_lab.observe.log import telling
from ddp_lab.run.loss_check import check_divided_loss
from ddp_lab.run.speed import find_options
from ddp_lab.strategies.base import Strategy
from ddp_lab.tasks.base import Task
from ddp_lab.tasks.build import build_loss
from ddp_lab.tasks.classification import Classification, CrossEntropy
from ddp_lab.training.optimizer import MakeOptimizer, state_copies
from ddp_lab.training.performance import PerformanceOptions
from ddp_lab.training.plan import FitSettings, Plan
from ddp_lab.training.progress import Criterion
from ddp_lab.training.recipe import Recipe
from ddp_lab.training.schedule import build_shape, make_scheduler
from ddp_lab.training.step import StepOptions
from ddp_lab.training.trainer import Trainer
from ddp_lab.world.runtime import Runtime

LOADERS = {"device": DeviceLoader, "workers": WorkerLoader}
EVALUATED = 8  # batches that an evaluation computes at once with speed=auto: without gradients, in the memory of a step


@dataclass(frozen=True)
class Job:
    """What a run consists of before its ranks are connected.

    Attributes:
        strategy: after `partition`, before `setup`.
        dataset: the sets of samples; of a planned run only their sizes.
        plan: batch sizes, steps per epoch and learning rate.
        model: the complete model on the CPU, the same on every rank; on the meta device with model.init=by_block.
        task: what the model is trained for, with its loss, on the CPU.
        recipe: how the weights are updated, and how a step is executed.
        fit_settings: when training ends, and when the test set is evaluated.
        shapes: the shape of each tensor of the unsharded model, by name.
        checkpoint_bytes: the size of a checkpoint.
        notes: lines for the log.
        loaders: of the sets of the dataset, by name; none for a planned run.
    """

    strategy: Strategy
    dataset: Dataset
    plan: Plan
    model: nn.Module
    task: Task
    recipe: Recipe
    fit_settings: FitSettings
    shapes: dict[str, tuple[int, ...]]
    checkpoint_bytes: int
    notes: list[str]
    loaders: Mapping[str, Loader] = field(default_factory=dict[str, Loader])

    @property
    def runtime(self) -> Runtime:
        """This rank and the others."""
        return self.strategy.runtime

    @property
    def options(self) -> PerformanceOptions:
        """The performance options: of the config, as far as they are supported, and of speed=auto."""
        return self.recipe.performance

    def full_rate(self) -> float | None:
        """Return the samples per second at which the devices compute with the FLOP/s of their data sheet; None: unknown.

        Call it before `trainer`, which cuts the model.
        """
        runtime, devices = self.runtime, self.strategy.num_devices
        peak = runtime.peak_flops()
        flops = count_flops(self.model, random_like(self.dataset.example(2)[0])) if peak else None
        return devices * peak / flops if peak and flops else None

    def trainer(self) -> Trainer:
        """Connect the ranks, and place the model on its devices with optimizer, schedule and step. Collective, once."""
        return Trainer(self.strategy, self.model, self.task, self.recipe)


def build(cfg: DictConfig, runtime: Runtime, with_weights: bool = True) -> Job:
    """Construct a run. Collective. It does not open the process group and writes nothing but missing downloads.

    Args:
        cfg: the config, checked.
        runtime: the ranks.
        with_weights: whether to load the file `model.weights`, which a run that resumes from a checkpoint does not need.

    Raises:
        ConfigError: a value of the config is not allowed with this model, dataset, strategy, device or number of ranks.
    """
    strategy = construct("strategy", cfg.strategy, runtime)
    dataset = load_dataset(cfg, runtime)
    plan = make_plan(cfg, strategy, dataset)
    task = make_task(cfg, dataset)
    trial = make_trial(dataset, task, freezes=not strategy.find_unused_parameters)
    built = make_model(cfg.model, dataset.model_shape(), runtime, cfg.seed, trial, with_weights)
    built.notes.extend(check_divided_loss(cfg, strategy, dataset, plan, built.model, task))
    job = arrange(cfg, strategy, dataset, plan, built, task)
    return replace(job, loaders=make_loaders(cfg, job))


def load_dataset(cfg: DictConfig, runtime: Runtime) -> Dataset:
    """Return the dataset in host memory. Collective: the first rank of each machine loads it first, and may download it."""
    data, loaded = cfg.data, list[Dataset]()
    source = make_source(cast("dict[str, Any]", OmegaConf.to_container(data, resolve=True)), cfg.seed)
    # The log begins with the run directory.
    slow = telling("preparing the data: downloading or reading", partial(print, flush=True))
    with slow if runtime.rank == 0 else nullcontext():
        runtime.agree("dataset", lambda: loaded.append(source.load()), per_node=True)
        dataset = hold_out(loaded[0] if loaded else source.load(), data.val_fraction, data.val_seed)
    if dataset.digest:
        runtime.conclude("same dataset", dataset.digest, check_same)
    return dataset


def make_plan(cfg: DictConfig, strategy: Strategy, dataset: Dataset) -> Plan:
    """Return the batch sizes, steps per epoch and learning rate."""
    keys = ("batch_size", "scaling", "accumulate", "lr_scaling", "lr_base_batch_size")
    values, world_size = {key: cfg[key] for key in keys}, strategy.runtime.world_size
    return Plan.make(values, cfg.optimizer.lr, world_size, strategy.replicas, dataset.train.size)


def make_task(cfg: DictConfig, dataset: Dataset) -> Task:
    """Return what the model is trained for, on the CPU."""
    mixed = cfg.mixup > 0 or cfg.cutmix > 0
    task = get_object(cfg.task["_target_"])
    if not issubclass(task, Classification):
        if mixed:
            raise ConfigError(f"mixup={cfg.mixup:g}, cutmix={cfg.cutmix:g}: are for task=classification; use mixup=0 cutmix=0")
        loss = build_loss(cfg.loss)
        if isinstance(loss, CrossEntropy):
            raise ConfigError(
                f"loss=cross_entropy: is for task=classification, got task._target_={cfg.task['_target_']}. Use loss=default, "
                "the task's own loss, or loss=own"
            )
        return construct("task", cfg.task, loss=loss)
    is_tokens = "vocabulary" in dataset.model_shape()
    if is_tokens or not dataset.classes:
        advice = "use task=tokens" if is_tokens else "set data.num_classes, or choose another task"
        raise ConfigError(f"task=classification: needs a dataset with a class for each sample; {advice}")
    loss = build_loss(cfg.loss, len(dataset.classes), mixed)
    return construct("task", cfg.task, loss=loss)


def make_trial(dataset: Dataset, task: Task, freezes: bool = True) -> Trial:
    """Return what the model is tried with: two samples in the form of the dataset's. `freezes` is that of a Trial."""
    inputs, targets = dataset.example(2)
    if isinstance(task, Classification):
        for name, samples in dataset.sets.items():
            require_class_targets(name, *samples.forms[1])
        check_classes = partial(check_logits, classes=len(dataset.classes))
        return Trial(random_like(inputs), check_classes, freezes=freezes)

    def check(outputs: torch.Tensor) -> None:
        task.loss_sum(outputs.float(), targets.to(outputs.device))

    return Trial(random_like(inputs), check, of_all=True, freezes=freezes)


def require_class_targets(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check that the targets of a set are classes, by the shape and dtype of the first one.

    Raises:
        ConfigError: they are not.
    """
    if shape or dtype != torch.int64:
        kind = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"task=classification: the targets of the {name} set are {kind} of shape {list(shape)}; expected a class for "
            "each sample, int64 of shape []. Return it by int(target), or choose another task"
        )


def arrange(cfg: DictConfig, strategy: Strategy, dataset: Dataset, plan: Plan, built: BuiltModel, task: Task) -> Job:
    """Let the strategy decide who holds which part of the model, and return the job without loaders. Collective on GPUs.

    The arguments are constructed as in `build`; the planner has another model and only the sizes of the dataset.

    Raises:
        ConfigError: the model, the batch or the loss is not supported.
    """
    mix, shape = None, dataset.model_shape()
    if cfg.mixup > 0 or cfg.cutmix > 0:
        sizes = plan.global_batch_size, strategy.dp_size, shape["image_size"], shape["num_classes"]
        mix = Mix(cfg.mixup, cfg.cutmix, *sizes, seed=cfg.seed)
    steps = plan.steps_per_epoch
    scheduler = partial(
        make_scheduler,
        shape=build_shape(cfg.scheduler, cfg.epochs),
        epochs=cfg.epochs,
        steps_per_epoch=steps,
        warmup_steps=round(cfg.warmup_epochs * steps),
    )
    optimizer, model = partial(instantiate(cfg.optimizer), lr=plan.lr), built.model
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    size = checkpoint_bytes(optimizer, model, cfg.ema is not None)
    if strategy.needs_chain:
        require_chain(model, strategy.name, key_of(cfg.model))
    ((strategy.input_shape, strategy.input_dtype), _) = dataset.train.forms
    strategy.partition(model, plan.samples_at_once)
    strategy.initial_weights = built.initial_weights
    options = find_options(cfg, strategy, dataset, model)
    step = StepOptions(cfg.accumulate, cfg.max_grad_norm, cfg.on_nan == "skip", mix, seed=cfg.seed)
    batch_size, decay = plan.global_batch_size, cfg.decay_norms_and_biases
    return Job(
        strategy=strategy,
        dataset=dataset,
        plan=plan,
        model=model,
        task=task,
        recipe=Recipe(batch_size, optimizer, scheduler, step, cfg.ema, cfg.ema_warmup, decay, options),
        fit_settings=FitSettings(
            cfg.epochs,
            cfg.patience,
            cfg.evaluate_test,
            criterion(cfg, dataset) or "val_loss",
            Every.parse(cfg.log_every) or Every(),
        ),
        shapes=shapes,
        checkpoint_bytes=size,
        notes=[*built.notes, *options.disabled],
    )


def checkpoint_bytes(optimizer: MakeOptimizer, model: nn.Module, ema: bool) -> int:
    """Return the size in bytes of a checkpoint's tensors: the unsharded model, its averages and the optimizer's state.

    Args:
        optimizer: constructs the optimizer of a list of parameters.
        model: the unsharded model.
        ema: whether the weights are averaged.
    """
    parameters = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return (1 + ema) * sum(tensor.nbytes for tensor in model.state_dict().values()) + state_copies(optimizer) * parameters


def make_loaders(cfg: DictConfig, job: Job) -> Mapping[str, Loader]:
    """Return the loaders of the sets of the dataset, by name. That of the training set is shuffled and augmented."""
    data, strategy, make = cfg.data, job.strategy, LOADERS[job.options.loader]
    training = LoaderOptions(
        batch_size=job.plan.global_batch_size,
        dp_rank=strategy.dp_rank,
        dp_size=strategy.dp_size,
        device=strategy.device,
        mean=data.mean,
        std=data.std,
        shuffle=True,
        seed=cfg.seed,
        crop_padding=data.crop_padding,
        flip=data.flip,
        num_workers=data.num_workers,
        ignore=getattr(job.task, "ignore", 255),
        labels=None if job.options.compile else job.task.labels,  # a compiled loss reads no labels
    )
    larger = EVALUATED if job.options.cuda_graph and "cuda_graph" in job.options.reasons else 1
    evaluated = replace(training, batch_size=larger * training.batch_size, shuffle=False, crop_padding=0, flip=False)
    return {name: make(found, training if name == "train" else evaluated) for name, found in job.dataset.sets.items()}


def criterion(cfg: DictConfig, dataset: Dataset) -> Criterion | None:
    """Return the metric of the validation set that chooses the best checkpoint; None: the last weights are the result."""
    best = cfg.checkpoint.best
    return ("val_loss" if dataset.val is not None else None) if best == "auto" else best
