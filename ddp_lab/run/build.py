"""The construction of a run from its config.

What the config names is built here, and everything else gets values.

    cfg -> strategy -> dataset -> sizes -> model -> loss, partition, performance options -> loaders
    -> settings

`prepare` is this path, with the checks of everything that can be refused before a directory is
created; the planner and the doctor use its parts, in the same order. Below this file nothing knows
the config.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ddp_lab.config.build import build as instantiate
from ddp_lab.config.build import chosen_trackers, construct
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.config.types import Every
from ddp_lab.data.batch import LoaderOptions
from ddp_lab.data.dataset import Dataset, InMemory, hold_out, require_same_data
from ddp_lab.data.loader import DeviceLoader, Loader
from ddp_lab.launchers.recorded_config import to_record, without_secrets
from ddp_lab.models import make as models
from ddp_lab.models.make import BuiltModel, ModelSpec
from ddp_lab.observe.log import log_if_slow
from ddp_lab.run import checks
from ddp_lab.run.data_record import input_shape_of, read_data
from ddp_lab.run.job import CheckpointSettings, Job, RunSettings
from ddp_lab.strategies.base import Strategy
from ddp_lab.tasks.base import LossFunction, Task
from ddp_lab.tasks.classification import Classification, CrossEntropy
from ddp_lab.training.optimizer import MakeOptimizer, state_copies
from ddp_lab.training.performance import AUTO, KEYS, PerformanceOptions, Wanted, plain_options
from ddp_lab.training.plan import FitSettings, TrainSizes
from ddp_lab.training.progress import Criterion
from ddp_lab.training.schedule import make_scheduler, try_shape
from ddp_lab.training.step import StepOptions
from ddp_lab.training.trainer import Recipe
from ddp_lab.world.device import float32_matmul
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:
    from ddp_lab.data.images import ImageOptions
    from ddp_lab.data.sources import Source
    from ddp_lab.data.trees import Tree
    from ddp_lab.launchers.preflight import Finding
    from ddp_lab.models.trial import Trial
    from ddp_lab.run.trained import TrainedRun

TORCHVISION = "ddp_lab.models.torchvision_models.torchvision_model"
GROUPS = ("data", "model", "strategy", "optimizer", "scheduler")  # that distinguish runs in a table
OWN_LOSS = "ddp_lab.tasks.build.default"  # loss=default: the task's own one
OF_TREES = "it was never tested with inputs or targets that are a tuple or dict"
OF_ANY_LENGTH = (
    "data.collate_fn may return another shape in each batch; pad to a fixed length in the dataset, "
    "and leave data.collate_fn out"
)
PAIR = 1  # data.targets of samples that are (input, target)
# batches that an evaluation computes at once with speed=auto: without gradients, in the memory of a
# step
EVALUATED = 8


def build(cfg: DictConfig, runtime: Runtime, with_weights: bool = True) -> Job:
    """Construct a run.

    Collective. It does not open the process group and writes nothing but missing downloads.

    Args:
        cfg: the config, checked.
        runtime: the ranks.
        with_weights: whether to load the file `model.weights`, which a run that resumes from a
            checkpoint does not need.

    Raises:
        ConfigError: a value of the config is not allowed with this model, dataset, strategy, device
            or number of ranks.
    """
    strategy = construct("strategy", cfg.strategy, runtime)
    dataset = load_dataset(cfg, runtime)
    sizes = make_sizes(cfg, strategy, dataset)
    task = make_task(cfg, dataset)
    spec = model_spec(cfg.model, dataset.model_shape())
    if isinstance(task, Classification):
        require_classes(dataset)

    trial = None
    if not (spec.is_own and isinstance(task, Classification)):
        trial = make_trial(dataset, task, freezes=not strategy.may_leave_unused)
    built = models.make_model(spec, runtime, cfg.seed, trial, with_weights)
    strategy.idle = built.unused
    is_divided = (strategy.dp_size, cfg.accumulate, strategy.num_microbatches) != (1, 1, 1)
    if is_divided or cfg.loss_over_batch:
        from ddp_lab.run.loss_check import check_divided_loss
        from ddp_lab.training.divided_loss import Division

        group = "task" if task.loss is None else "loss"
        key = f"{group}._target_={cfg[group]['_target_']}"
        division = Division(strategy, sizes.global_batch_size, cfg.accumulate)
        built.notes.extend(
            check_divided_loss(cfg.loss_over_batch, division, dataset, built.model, task, key)
        )
    job = assemble(cfg, strategy, dataset, sizes, built, task)
    return replace(job, loaders=make_loaders(cfg, job))


def load_dataset(cfg: DictConfig, runtime: Runtime) -> Dataset:
    """Return the dataset in host memory.

    Collective: the first rank of each machine loads it first, and may download it.
    """
    data = cfg.data
    loaded: list[Dataset] = []
    source = make_source(plain(data), cfg.seed)
    # The log begins with the run directory.
    slow = log_if_slow("preparing the data: downloading or reading", partial(print, flush=True))
    with slow if runtime.rank == 0 else nullcontext():
        runtime.broadcast_from_rank0("dataset", lambda: loaded.append(source.load()), per_node=True)
        dataset = hold_out(loaded[0] if loaded else source.load(), data.val_fraction, data.val_seed)
    sizes = {name: samples.size for name, samples in dataset.sets.items()}
    runtime.gather_and_decide("same dataset", [dataset.digest, sizes], require_same_data)
    return dataset


def make_source(data: Mapping[str, Any], seed: int) -> "Source":
    """Construct the source that the config group `data` describes.

    Args:
        data: the config group, as plain values.
        seed: the run's seed.

    Raises:
        ConfigError: the class is neither a source nor, under data=own, a map-style dataset.
    """
    node = data["dataset"]
    target = get_object(node["_target_"])
    images = image_options(data)
    if hasattr(target, "load") and not hasattr(target, "__getitem__"):
        if data.get("targets", PAIR) != PAIR or data.get("collate_fn", {}).get("_target_"):
            raise ConfigError(
                f"data.dataset._target_={node['_target_']}: has the method load, and so decides "
                "itself what a sample is; data.targets and data.collate_fn are for a map-style "
                "dataset, with __len__ and __getitem__. Leave them out"
            )
        # By position, because instantiate would turn a dataclass that is passed by name into a
        # DictConfig.
        arguments = [images] if "images" in inspect.signature(target).parameters else []
        return construct("data.dataset", node, *arguments)

    if images is None or "val_split" not in data:
        raise ConfigError(
            f"data.dataset._target_={node['_target_']}: must have the method load; a map-style "
            "dataset needs data=own"
        )
    from ddp_lab.data.sources import Own

    targets = data.get("targets", PAIR)
    collate_fn = build_collate_fn(data.get("collate_fn", {}))
    splits = {"train": "train", "val": data["val_split"], "test": data["test_split"]}
    parameters = inspect.signature(target).parameters
    make = partial(instantiate, node)
    return Own(
        make,
        node["_target_"],
        parameters,
        splits,
        images,
        data["num_classes"],
        seed,
        targets,
        collate_fn,
    )


def build_collate_fn(node: dict[str, Any]) -> Callable[[list[Any]], Any] | None:
    """Construct the function that makes a batch of samples: what `_target_` names, or an object of
    a class.

    Args:
        node: the config group `data.collate_fn`.

    Returns:
        None if the config names none.

    Raises:
        ConfigError: the constructor fails, or its object cannot be called.
    """
    if node.get("_target_") is None:
        return None
    is_class = inspect.isclass(get_object(node["_target_"]))
    built = construct("data.collate_fn", node, _partial_=not is_class)
    if not callable(built):
        raise ConfigError(
            f"data.collate_fn._target_={node['_target_']}: must be a function of a list of "
            "samples, or a class whose objects can be called with one, by __call__"
        )
    return built


def image_options(data: Mapping[str, Any]) -> "ImageOptions | None":
    """Return how images are transformed according to the config group `data`.

    Return None if it names a dataset in memory.
    """
    if "image_size" not in data:
        return None
    from ddp_lab.data.images import ImageOptions

    return ImageOptions(**{key: data[key] for key in ImageOptions.__dataclass_fields__})


def make_sizes(cfg: DictConfig, strategy: Strategy, dataset: Dataset) -> TrainSizes:
    """Return the batch sizes, steps per epoch and learning rate."""
    keys = ("batch_size", "scaling", "accumulate", "lr_scaling", "lr_base_batch_size")
    values = {key: cfg[key] for key in keys}
    world_size = strategy.runtime.world_size
    return TrainSizes.make(
        values, cfg.optimizer.lr, world_size, strategy.replicas, dataset.train.size
    )


def make_task(cfg: DictConfig, dataset: Dataset) -> Task:
    """Return what the model is trained for, on the CPU."""
    mixed = cfg.mixup > 0 or cfg.cutmix > 0
    task = get_object(cfg.task["_target_"])
    if not issubclass(task, Classification):
        if mixed:
            raise ConfigError(
                f"mixup={cfg.mixup:g}, cutmix={cfg.cutmix:g}: are for task=classification; use "
                "mixup=0 cutmix=0"
            )
        loss = build_loss(cfg.loss)
        if isinstance(loss, CrossEntropy):
            raise ConfigError(
                "loss=cross_entropy: is for task=classification, got "
                f"task._target_={cfg.task['_target_']}. Use loss=default, the task's own loss, or "
                "loss=own"
            )
        return construct("task", cfg.task, loss=loss)

    is_tokens = "vocabulary" in dataset.model_shape()
    if is_tokens or not dataset.classes:
        advice = "use task=tokens" if is_tokens else "set data.num_classes, or choose another task"
        raise ConfigError(
            f"task=classification: needs a dataset with a class for each sample; {advice}"
        )
    loss = build_loss(cfg.loss, len(dataset.classes), mixed)
    return construct("task", cfg.task, loss=loss)


def build_loss(
    node: DictConfig | dict[str, Any], num_classes: int | None = None, mixed: bool = False
) -> LossFunction | None:
    """Construct the loss that `_target_` names: a class or a function.

    A class is called once; a function is the loss itself.

    Either is given reduction="none" if it has a parameter of that name.

    Args:
        node: the config group `loss`.
        num_classes: number of classes of the dataset; None: the task is not classification, and the
            loss is not tried.
        mixed: whether it gets mixed targets.

    Raises:
        ConfigError: the constructor fails, or the loss is not one for these data
            (`check_loss_function`).
    """
    if node["_target_"] == OWN_LOSS:
        return None
    key = f"loss._target_={node['_target_']}"
    target = get_object(node["_target_"])
    arguments = {"reduction": "none"} if "reduction" in inspect.signature(target).parameters else {}
    try:
        built = instantiate(node, **arguments, _partial_=not inspect.isclass(target))
    except Exception as error:
        raise ConfigError(f"{key}: cannot be constructed: {describe_error(error)}") from None
    if not isinstance(built, CrossEntropy):
        from ddp_lab.tasks.build import check_loss_function

        check_loss_function(built, key, num_classes, mixed)
    return built


def build_shape(node: DictConfig | dict[str, Any], epochs: int) -> Callable[..., float]:
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


def model_spec(node: DictConfig | dict[str, Any], shape: Mapping[str, Any]) -> ModelSpec:
    """Return how the model that `_target_` names is constructed.

    Args:
        node: the config group `model`; `weights` and `init` are not passed to the constructor.
        shape: the arguments that follow from the data, for example in_channels and num_classes
            (`Dataset.model_shape`). Only those are passed that are parameters of the class or
            function.

    Raises:
        ConfigError: an option follows from the data.
    """
    target = str(node["_target_"])
    function = get_object(target)
    accepted = inspect.signature(function).parameters
    options = {key: value for key, value in plain(node).items() if key not in ("weights", "init")}
    passed = {name: value for name, value in shape.items() if name in accepted}
    for name in passed.keys() & options.keys():
        raise ConfigError(
            f"model.{name}={options[name]}: follows from the data, where it is {shape[name]}; "
            "leave it out"
        )

    return ModelSpec(
        make=partial(instantiate, options, **passed),
        target=target,
        name=str(node["name"]) if target == TORCHVISION else None,
        input_shape=input_shape_of(shape),
        of_tokens="vocabulary" in shape,
        num_classes=shape.get("num_classes", 0),
        weights=node.get("weights"),
        by_block=node.get("init") == "by_block",
    )


def build_model(
    node: DictConfig | dict[str, Any], shape: Mapping[str, Any], inputs: "Tree" = None
) -> nn.Module:
    """Construct the model that `_target_` names, as `models.make.build_model`.

    Other arguments are those of `model_spec`.
    """
    return models.build_model(model_spec(node, shape), inputs)


def make_model(
    node: DictConfig | dict[str, Any],
    shape: Mapping[str, Any],
    runtime: Runtime,
    seed: int,
    trial: "Trial | None",
    with_weights: bool = True,
) -> BuiltModel:
    """Construct and try a model, as `models.make.make_model`.

    The first two arguments are those of `model_spec`.
    """
    return models.make_model(model_spec(node, shape), runtime, seed, trial, with_weights)


def make_trial(dataset: Dataset, task: Task, freezes: bool = True) -> "Trial":
    """Return what the model is tried with: two samples in the form of the dataset's.

    `freezes` is that of a Trial.
    """
    from ddp_lab.models.trial import Trial, check_logits, random_like
    from ddp_lab.tasks.nested import device_of, outputs_for, targets_for

    inputs, targets = dataset.train.example(2)
    if isinstance(task, Classification):
        require_classes(dataset)

        def check_classes(outputs: Any) -> torch.Tensor:
            logits = outputs_for(task, outputs, "it")
            check_logits(logits, len(dataset.classes))
            return logits.float().sum()

        return Trial(random_like(inputs), check_classes, freezes=freezes)

    def check(outputs: Any) -> torch.Tensor:
        taken = outputs_for(task, outputs, "it")
        expected = targets_for(task, targets, device_of(taken))
        loss, _ = task.loss_sum(taken, expected)
        return loss

    return Trial(random_like(inputs), check, of_all=True, freezes=freezes)


def require_classes(dataset: Dataset) -> None:
    """Check that the targets of all sets are classes, as `require_class_targets`."""
    for name, samples in dataset.sets.items():
        _, targets = samples.example(1, "meta")
        if not isinstance(targets, torch.Tensor):
            kind = "none" if targets is None else f"a {type(targets).__name__}"
            raise ConfigError(
                f"task=classification: the targets of the {name} set are {kind}; expected a class "
                "for each sample, int64 of shape []. Choose it by data.targets, or choose another "
                "task"
            )
        require_class_targets(name, tuple(targets.shape[1:]), targets.dtype)


def require_class_targets(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check that the targets of a set are classes, by the shape and dtype of the first one.

    Raises:
        ConfigError: they are not.
    """
    if shape or dtype != torch.int64:
        kind = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"task=classification: the targets of the {name} set are {kind} of shape "
            f"{list(shape)}; expected a class for each sample, int64 of shape []. Return it by "
            "int(target), or choose another task"
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
    mix = None
    shape = dataset.model_shape()
    if cfg.mixup > 0 or cfg.cutmix > 0:
        from ddp_lab.data.augment import Mix

        mix = Mix(
            cfg.mixup,
            cfg.cutmix,
            sizes.global_batch_size,
            strategy.dp_size,
            shape["image_size"],
            shape["num_classes"],
            seed=cfg.seed,
        )

    steps = sizes.steps_per_epoch
    scheduler = partial(
        make_scheduler,
        shape=build_shape(cfg.scheduler, cfg.epochs),
        epochs=cfg.epochs,
        steps_per_epoch=steps,
        warmup_steps=round(cfg.warmup_epochs * steps),
    )

    optimizer = partial(instantiate(cfg.optimizer), lr=sizes.lr)
    model = built.model
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    size = checkpoint_bytes(optimizer, model, cfg.ema is not None)

    if strategy.needs_chain:
        models.require_chain(model, strategy.name, model_spec(cfg.model, shape).key)
    strategy.example, _ = dataset.train.example(2, "meta")
    if dataset.train.is_tree:
        strategy.unsupported |= dict.fromkeys(("cuda_graph", "compile", "channels_last"), OF_TREES)
    elif not dataset.train.has_fixed_shapes:
        strategy.unsupported |= dict.fromkeys(("cuda_graph", "compile"), OF_ANY_LENGTH)
    strategy.partition(model, sizes.samples_at_once)
    strategy.initial_weights = built.initial_weights

    options = find_performance(cfg, strategy, dataset, model)
    step = StepOptions(cfg.accumulate, cfg.max_grad_norm, cfg.on_nan == "skip", mix, seed=cfg.seed)
    batch_size = sizes.global_batch_size
    decay = cfg.decay_norms_and_biases
    return Job(
        strategy=strategy,
        dataset=dataset,
        sizes=sizes,
        model=model,
        task=task,
        recipe=Recipe(
            batch_size, optimizer, scheduler, step, cfg.ema, cfg.ema_warmup, decay, options
        ),
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


def find_performance(
    cfg: DictConfig, strategy: Strategy, dataset: Dataset, model: nn.Module
) -> PerformanceOptions:
    """Return the performance options of a run.

    Collective with speed=auto on GPUs. Arguments as in `find_options`.
    """
    wanted = what_is_wanted(cfg)
    is_automatic = wanted.speed == AUTO and strategy.device.type == "cuda"
    if wanted.is_plain and not is_automatic:
        in_memory = all(isinstance(samples, InMemory) for samples in dataset.sets.values())
        return plain_options(wanted, in_memory)
    from ddp_lab.run.speed import find_options

    return find_options(wanted, strategy, dataset, model)


def what_is_wanted(cfg: DictConfig) -> Wanted:
    """Return what the config says about performance."""
    options = {name: OmegaConf.select(cfg, key) for name, key in KEYS.items()}
    target = str(cfg.optimizer["_target_"])
    return Wanted(cfg.speed, options, get_object(target), target)


def checkpoint_bytes(optimizer: MakeOptimizer, model: nn.Module, ema: bool) -> int:
    """Return the size in bytes of a checkpoint's tensors.

    They are the unsharded model, its averages and the optimizer's state.

    Args:
        optimizer: constructs the optimizer of a list of parameters.
        model: the unsharded model.
        ema: whether the weights are averaged.
    """
    parameters = sum(
        parameter.nbytes for parameter in model.parameters() if parameter.requires_grad
    )
    return (1 + ema) * sum(tensor.nbytes for tensor in model.state_dict().values()) + state_copies(
        optimizer, model.parameters()
    ) * parameters


def make_loaders(cfg: DictConfig, job: Job) -> Mapping[str, Loader]:
    """Return the loaders of the sets of the dataset, by name.

    That of the training set is shuffled and augmented.
    """
    data = cfg.data
    strategy = job.strategy
    make = loader_class(job.options.loader)
    training = LoaderOptions(
        batch_size=job.sizes.global_batch_size,
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
    evaluated = replace(
        training, batch_size=larger * training.batch_size, shuffle=False, crop_padding=0, flip=False
    )
    return {
        name: make(samples, training if name == "train" else evaluated)
        for name, samples in job.dataset.sets.items()
    }


def loader_class(name: str) -> type[Loader]:
    """Return the loader that a value of data.loader chooses."""
    if name == "device":
        return DeviceLoader
    from ddp_lab.data.workers import WorkerLoader

    return WorkerLoader


def plain(node: DictConfig | dict[str, Any]) -> dict[str, Any]:
    """Return a part of the config as plain values."""
    if isinstance(node, DictConfig):
        return cast("dict[str, Any]", OmegaConf.to_container(node, resolve=True))
    return node


def criterion(cfg: DictConfig, dataset: Dataset) -> Criterion | None:
    """Return the metric of the validation set that chooses the best checkpoint.

    With None the last weights are the result.
    """
    best = cfg.checkpoint.best
    if best != "auto":
        return best
    return None if dataset.val is None else "val_loss"


def open_run(folder: Path, choice: str) -> "TrainedRun":
    """Open a trained run in one process. It needs no data.

    Args:
        folder: the run directory.
        choice: its checkpoint, as in `find_checkpoint`.

    Raises:
        ConfigError: the directory is not that of a run, or the file is not a checkpoint of its
            model.
    """
    from ddp_lab.launchers.recorded_config import read_config
    from ddp_lab.run.trained import InputFormat, TrainedRun, checkpoint_of, load_trained

    cfg = read_config(folder)
    data = read_data(folder)
    path = checkpoint_of(folder, choice, Runtime("cpu"))
    model = load_trained(build_model(cfg.model, data.shape), path)
    collates = OmegaConf.select(cfg, "data.collate_fn._target_") is not None
    inputs = InputFormat(
        list(cfg.data.mean), list(cfg.data.std), image_options(cfg.data), is_fixed=not collates
    )
    task = get_object(cfg.task["_target_"])
    return TrainedRun(data, path, model, task, inputs, cfg.precision, cfg.float32_matmul)


def evaluate_run(
    cfg: DictConfig, runtime: Runtime, folder: Path, checkpoint: str, split: str | None = None
) -> dict[str, Any]:
    """Evaluate a checkpoint on a set of the config's data. Collective.

    Args:
        cfg: the run's config, with overrides.
        runtime: the ranks.
        folder: the run directory.
        checkpoint: as in `find_checkpoint`.
        split: val or test; None: test or, if there is no test set, val.

    Returns:
        As `evaluate_job`.

    Raises:
        ConfigError: the checkpoint, the data or the strategy cannot be used.
    """
    from ddp_lab.launchers.preflight import check_network
    from ddp_lab.run.trained import checkpoint_of, evaluate_job

    check_network(runtime)
    path = checkpoint_of(folder, checkpoint, runtime)
    job = build(cfg, runtime, with_weights=False)
    with float32_matmul(cfg.float32_matmul):
        return evaluate_job(job, folder, path, split)


def prepare(cfg: DictConfig, runtime: Runtime, notes: Sequence[str] = ()) -> Job:
    """Construct a run and check everything that can be checked before its directory is created.

    Collective.

    Args:
        cfg: the config, in which no value is left to be chosen by memory.
        runtime: the ranks.
        notes: lines for the log about what was chosen.

    Raises:
        ConfigError: the config cannot be used, or a machine cannot take part in the run.
    """
    findings: list[Finding] = []
    if runtime.world_size > 1:
        from ddp_lab.launchers.preflight import check_network

        findings = check_network(runtime)
    source = find_resumed(cfg, runtime)
    job = build(cfg, runtime, with_weights=source is None)
    job.notes[:0] = notes
    checks.check_selection(
        {key: OmegaConf.select(cfg, key) for key in checks.SELECTING}, job.dataset, job.task
    )

    if cfg.profile:
        from ddp_lab.training.profiler import check_profile

        check_profile(cfg.epochs * job.sizes.steps_per_epoch, job.strategy.device)
    settings = make_settings(cfg, job, source, findings)
    checks.check_job(job, settings)
    return replace(job, settings=settings)


def find_resumed(cfg: DictConfig, runtime: Runtime) -> Path | None:
    """Return what the run resumes from, as from `find_source`.

    A mirror first restores what this disk has lost. Collective.
    """
    runs_dir = Path(cfg.runs_dir)
    if cfg.checkpoint.mirror:
        checks.restore_lost(cfg.checkpoint.mirror, runs_dir, cfg.name, cfg.resume, runtime)
    return checks.agree_on_source(runs_dir, cfg.name, cfg.resume, runtime)


def make_settings(
    cfg: DictConfig, job: Job, source: Path | None, findings: "list[Finding]"
) -> RunSettings:
    """Return where the run is recorded, and what protects it."""
    if HydraConfig.initialized():
        choices = HydraConfig.get().runtime.choices
    else:
        choices = dict.fromkeys(GROUPS, "")
    config = plain(cfg)
    hparams = {group: choices[group] for group in GROUPS} | {
        key: cfg[key] for key in ("epochs", "precision", "seed")
    }
    sizes = job.sizes
    hparams |= {
        "lr": sizes.lr,
        "global_batch_size": sizes.global_batch_size,
        "devices": job.strategy.num_devices,
    }

    keys = ("every_epochs", "every_steps", "keep", "on_error", "format", "mirror")
    checkpoint = {key: cfg.checkpoint[key] for key in keys}
    protection = {
        key: cfg[key]
        for key in ("name", "resume", "on_nan", "check_replicas", "inject", "profile", "timeout")
    }
    return RunSettings(
        runs_dir=Path(cfg.runs_dir),
        label=f"{choices['model']}-{choices['data']}-{choices['strategy']}",
        title=f"{choices['model']} on {choices['data']}, {cfg.precision}",
        source=source,
        findings=findings,
        checkpoint=CheckpointSettings(
            **checkpoint, at_steps=list(cfg.checkpoint.at_steps), best=criterion(cfg, job.dataset)
        ),
        float32_matmul=cfg.float32_matmul,
        config=to_record(cfg),
        tracked=without_secrets(config),
        hparams=hparams,
        trackers=chosen_trackers(config["tracker"], config["tracker_options"]),
        **protection,
    )
