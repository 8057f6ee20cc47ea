"""Construction of the parts of a run. Only the subpackage `run` and the commands read the config.

`Job` constructs each part when it is first read, and reports mistakes in the config that concern it. `prepare` constructs all
parts. `materialize` (materialize.py) then connects the ranks and places the model on its devices. train.py, the doctor, the
benchmark and the tests use the same functions.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ddp_lab.config.build import build
from ddp_lab.data.augment import Mix
from ddp_lab.data.held_out import hold_out
from ddp_lab.data.loader import DeviceLoader, Loader, LoaderOptions
from ddp_lab.data.samples import Dataset
from ddp_lab.data.sources import check_same, make_source
from ddp_lab.data.workers import WorkerLoader
from ddp_lab.launch.preflight.storage import checkpoint_bytes
from ddp_lab.models.make import BuiltModel, key_of, make_model, require_chain
from ddp_lab.observe.profiler import check_profile
from ddp_lab.run.selection import check_selection
from ddp_lab.run.speed import find_choices
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.loss import Loss, build_loss
from ddp_lab.training.loop import FitSettings
from ddp_lab.training.on_shards import require_support
from ddp_lab.training.plan import Plan
from ddp_lab.training.schedule import build_shape
from ddp_lab.training.speed.auto import Choice
from ddp_lab.training.speed.options import PerformanceOptions
from ddp_lab.world.runtime import Runtime

LOADERS = {"device": DeviceLoader, "workers": WorkerLoader}
EVALUATED = 8  # batches that an evaluation computes at once with speed=auto: without gradients, in the memory of a step
SHARDED_FROM = 4 * 2**30  # size in bytes of a checkpoint from which checkpoint.format=auto shards it


class Job:
    """The parts of a run that are constructed before the ranks are connected.

    Each part is constructed when it is first read and needs only those above it, so that `ddp-lab doctor` can check them one by
    one. Reading a part raises a ConfigError if the config does not allow its construction. Reading `dataset` downloads a
    missing dataset.

    Args:
        with_weights: whether to load the file `model.weights`. A run that resumes from a checkpoint does not need it.

    Attributes:
        may_have_seen: whether the checkpoint to resume from may have been trained on samples that are now held out.
    """

    may_have_seen = False

    def __init__(self, cfg: DictConfig, runtime: Runtime, with_weights: bool = True):
        self.cfg, self.runtime, self.with_weights = cfg, runtime, with_weights

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy, before `Strategy.setup`."""
        return build(self.cfg.strategy, self.runtime)

    @cached_property
    def dataset(self) -> Dataset:
        """The dataset in host memory. Collective: the first rank of each machine downloads it if it is missing."""
        data = self.cfg.data
        source = make_source(cast("dict[str, Any]", OmegaConf.to_container(data, resolve=True)), self.cfg.seed)
        prepared = self.runtime.agree("dataset", source.prepare, per_node=True)
        dataset = hold_out(source.load() if prepared is None else source.load(prepared), data.val_fraction, data.val_seed)
        if dataset.digest:
            digests = self.runtime.collect("dataset", dataset.digest)
            self.runtime.agree("same dataset", lambda: check_same(digests or []))
        if self.runtime.local_rank == 0:
            dataset.release()
        return dataset

    @cached_property
    def plan(self) -> Plan:
        """The batch sizes, steps per epoch and learning rate."""
        cfg = self.cfg
        return Plan.make(
            world_size=self.runtime.world_size,
            replicas=self.strategy.replicas,
            train_size=self.dataset.train.size,
            batch_size=cfg.batch_size,
            scaling=cfg.scaling,
            accumulate=cfg.accumulate,
            lr=cfg.optimizer.lr,
            lr_scaling=cfg.lr_scaling,
            lr_base_batch_size=cfg.lr_base_batch_size,
        )

    @cached_property
    def model(self) -> nn.Module:
        """The model on the CPU, with the same weights on every rank; on the meta device with model.init=by_block."""
        return self.made.model

    @cached_property
    def made(self) -> BuiltModel:
        """The model with its initial weights, if it is on the meta device, and notes about it for the log."""
        torch.manual_seed(self.cfg.seed)
        return make_model(self.cfg.model, self.dataset.model_shape(), self.runtime, self.cfg.seed, self.with_weights)

    @property
    def notes(self) -> list[str]:
        """Lines for the log about the model."""
        return self.made.notes

    def give_weights(self, state: dict[str, torch.Tensor]) -> None:
        """Give the complete model these weights in place of its initial ones. Call it before `place`."""
        if self.made.initial_weights is None:
            self.model.load_state_dict(state)
        else:
            self.made.initial_weights.set_weights(state)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the unsharded model's tensors, by name. Read it before the strategy changes the model."""
        return {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}

    @cached_property
    def checkpoint_bytes(self) -> int:
        """The size of a checkpoint. Read it before the strategy changes the model."""
        return checkpoint_bytes(build(self.cfg.optimizer), self.model, self.cfg.ema is not None)

    @property
    def sharded(self) -> bool:
        """Whether checkpoints are sharded. Read `checkpoint_bytes` first, before the strategy changes the model."""
        large = self.runtime.world_size > 1 and self.checkpoint_bytes >= SHARDED_FROM
        return self.cfg.checkpoint.format == "sharded" or (self.cfg.checkpoint.format == "auto" and large)

    @cached_property
    def loss(self) -> Loss:
        """The training loss, on the CPU."""
        return build_loss(self.cfg.loss, len(self.dataset.classes), mixed=self.mix is not None)

    @cached_property
    def schedule(self) -> Callable[..., float]:
        """The shape of the learning-rate schedule."""
        return build_shape(self.cfg.scheduler, self.cfg.epochs)

    @cached_property
    def mix(self) -> Mix | None:
        """Mixup and CutMix of the training batches; None if both are off."""
        cfg, shape = self.cfg, self.dataset.model_shape()
        if cfg.mixup == cfg.cutmix == 0:
            return None
        return Mix(
            cfg.mixup,
            cfg.cutmix,
            batch_size=self.plan.global_batch_size,
            dp_size=self.strategy.dp_size,
            image_size=shape["image_size"],
            num_classes=shape["num_classes"],
            seed=cfg.seed,
            device=self.strategy.device,
        )

    def partition(self) -> None:
        """Let the strategy decide which part of the model each rank or device holds."""
        if self.strategy.needs_chain:
            require_chain(self.model, self.strategy.name, key_of(self.cfg.model))
        self.strategy.input_shape = self.dataset.train.shape
        self.strategy.partition(self.model, self.plan.samples_at_once)

    def check_optimizer(self) -> None:
        """Check that the optimizer can update what the strategy will hold. Call it after `partition`."""
        optimizer = build(self.cfg.optimizer)([nn.Parameter(torch.zeros(1))])
        require_support(optimizer, self.strategy, f"optimizer._target_={self.cfg.optimizer['_target_']}")

    @cached_property
    def loaders(self) -> Mapping[str, Loader]:
        """The loaders of the sets of the dataset, by name. That of the training set is shuffled and augmented."""
        data, make = self.cfg.data, LOADERS[self.choices["data.loader"].value]
        training = LoaderOptions(
            batch_size=self.plan.global_batch_size,
            dp_rank=self.strategy.dp_rank,
            dp_size=self.strategy.dp_size,
            device=self.strategy.device,
            mean=data.mean,
            std=data.std,
            shuffle=True,
            seed=self.cfg.seed,
            crop_padding=data.crop_padding,
            flip=data.flip,
            num_workers=data.num_workers,
        )
        graph = self.choices["cuda_graph"]
        larger = EVALUATED if graph.automatic and graph.value else 1
        evaluated = replace(training, batch_size=larger * training.batch_size, shuffle=False, crop_padding=0, flip=False)
        return {name: make(found, training if name == "train" else evaluated) for name, found in self.dataset.sets.items()}

    @property
    def fit_settings(self) -> FitSettings:
        """When training ends, and when the test set is evaluated."""
        return FitSettings(self.cfg.epochs, self.cfg.patience, self.cfg.evaluate_test)

    @cached_property
    def choices(self) -> dict[str, Choice]:
        """The choices of speed=auto, by config key; without it, what the config says. Collective on GPUs."""
        return find_choices(self.cfg, self.strategy, self.dataset, self.model)

    @cached_property
    def options(self) -> PerformanceOptions:
        """The requested performance options that are supported; the others are disabled and logged."""
        choices = self.choices
        wanted = PerformanceOptions(*(choices[key].value for key in PerformanceOptions._fields))
        return wanted.supported(self.strategy, choices["data.loader"].value, self.model)


def prepare(cfg: DictConfig, runtime: Runtime, with_weights: bool = True) -> Job:
    """Construct every part of a run. It does not open the process group and writes nothing but missing downloads.

    Args:
        with_weights: whether to load the file `model.weights`.

    Raises:
        ConfigError: A value of the config is not allowed with this model, dataset, strategy, device or number of ranks.
    """
    job = Job(cfg, runtime, with_weights)
    _ = job.strategy, job.dataset, job.plan
    check_selection(cfg, job.dataset)
    if cfg.profile:
        check_profile(cfg.epochs * job.plan.steps_per_epoch, job.strategy.device)
    _ = job.model, job.shapes, job.loss, job.schedule
    job.partition()
    _ = job.loaders
    return job
