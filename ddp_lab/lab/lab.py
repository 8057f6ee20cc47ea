"""The ranks of a script or a notebook, and trainers of models on them."""

import importlib
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import nn

from ddp_lab.config.build import construct
from ddp_lab.config.check import validate
from ddp_lab.config.errors import ConfigError, multiples
from ddp_lab.config.types import Checkpointing
from ddp_lab.data.lost_worker import find_lost_worker, lost_workers_ignored
from ddp_lab.lab.arguments import (
    LabKeys,
    TrainerKeys,
    as_task,
    find_strategy,
    make_further_hooks,
    make_further_metrics,
    name_of_target,
    require_module,
)
from ddp_lab.lab.calls import Calls
from ddp_lab.lab.example import Parts, find_example
from ddp_lab.lab.log import LabLogger
from ddp_lab.lab.prepared_model import prepare_model
from ddp_lab.lab.report import leave, wait_for_reporter
from ddp_lab.lab.trainer import LoopOptions, Trainer
from ddp_lab.observe.log import print_if_slow
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.dtensor import forget_layouts
from ddp_lab.tasks.base import LossFunction, Task
from ddp_lab.training.divided_loss import Division
from ddp_lab.training.hooks import Hook
from ddp_lab.training.loop_rates import KeptRates, OwnSchedule
from ddp_lab.training.step import StepOptions
from ddp_lab.training.trainer import Recipe
from ddp_lab.world.runtime import Runtime


class Lab:
    """The ranks that torchrun or `launch` has started, or this process alone; a context manager.

    The arguments mean what the keys of the same names mean for train.py. Only one Lab of a process
    is open at a time. Entering it raises a `ConfigError` if another one is open, and a `NodeError`
    if the device does not exist or there are more ranks than GPUs.

    Args:
        strategy: name of a strategy, that of a file in conf/strategy; or a subclass of
            ddp_lab.strategies.base.Strategy.
        device: auto, cpu, cuda, cuda:N or mps. auto is a CUDA GPU for each rank, or the CPU if
            there is none.
        precision: float32; or bf16 or fp16, which is mixed precision by torch.autocast. fp16 scales
            the loss, for GPUs without bf16.
        seed: seed of the order of the samples, and of torch's random state when the `with` block
            begins, and so of the models that are constructed in it.
        timeout: timeout of the communication between ranks, in seconds.
        run_dir: directory of the run, in which `log` writes metrics.jsonl; None: `log` only
            prints. A run that is resumed needs the same directory to continue its rows.
        tracker: name of a tracker, or a list of names. Trackers need a `run_dir`.
        tracker_options: options of each tracker by its name, for example
            {"wandb": {"mode": "offline"}}.
        options: keys of conf/strategy/STRATEGY.yaml, for example num_microbatches=4.

    Raises:
        ConfigError: there is no such strategy, or a key or value is not allowed, or a tracker has
            no `run_dir`.
    """

    # the process group, torch's random state and the device are those of a process
    _open: ClassVar["Lab | None"] = None

    def __init__(
        self,
        strategy: str | type[Strategy] = "single",
        device: str = "auto",
        precision: str = "float32",
        seed: int = 0,
        timeout: float = 600.0,
        run_dir: str | Path | None = None,
        tracker: str | list[str] = "none",
        tracker_options: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        keys = {"device": device, "precision": precision, "seed": seed, "timeout": timeout}
        validate(LabKeys, keys | {"tracker": tracker})
        self._strategy = find_strategy(strategy, options)
        self._keys = (device, precision, timeout)
        self.seed = seed
        folder = None if run_dir is None else Path(run_dir)
        self._log = LabLogger(
            folder,
            tracker,
            tracker_options or {},
            keys | {"strategy": name_of_target(self._strategy)},
        )
        self._runtime: Runtime | None = None
        self._trainers = weakref.WeakSet[Trainer]()
        self._numbers = itertools.count()  # of trainers
        self._folders: dict[Path, int] = {}  # of checkpoints, and the trainer that writes there

    def __enter__(self) -> "Lab":
        if Lab._open is not None:
            raise ConfigError(
                "Lab: another one is open in this process; leave its `with` block first, or use "
                "its methods"
            )
        self._runtime = Runtime(*self._keys)
        self._calls = Calls(self._runtime)
        self._calls.start()
        self._log.is_main = self.is_main
        Lab._open = self
        torch.manual_seed(self.seed)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        runtime = self.runtime
        self._runtime = None
        Lab._open = None
        Strategy.active = None
        outcome = ("finished", self._log.last) if error is None else ("failed", {})
        with lost_workers_ignored():
            closes = [trainer.close for trainer in self._trainers]
            failure = call_all(*closes, partial(self._log.close, *outcome))
            cause = find_lost_worker(error) or error or failure
            explained = call_all(partial(leave, self._calls, cause))
            failure = call_all(
                self._calls.close,
                partial(wait_for_reporter, explained or cause, runtime),
                partial(runtime.__exit__, kind, error, traceback),
                forget_layouts,
            )
        first = explained or cause or failure
        if first is not None and first is not error:
            raise first from None

    @property
    def runtime(self) -> Runtime:
        """This rank and the others.

        Raises:
            ConfigError: the Lab is not open, because the code is outside of its `with` block.
        """
        if self._runtime is None:
            raise ConfigError("Lab: is not open; use it as `with Lab(...) as lab:`")
        return self._runtime

    @classmethod
    def forget_open(cls) -> None:
        """Forget the Lab that is open in the process from which this one was forked."""
        cls._open = None

    @property
    def strategy_options(self) -> dict[str, Any]:
        """The class of the strategy, under the key `_target_`, and its options."""
        return dict(self._strategy)

    @property
    def rank(self) -> int:
        """The number of this process, from 0 to `world_size` - 1."""
        return self.runtime.rank

    @property
    def world_size(self) -> int:
        """The number of processes, on all nodes."""
        return self.runtime.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.runtime.is_main

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.runtime.device

    def print(self, *values: object) -> None:
        """Print on rank 0; the other ranks print nothing.

        Args:
            values: as for the function `print`.
        """
        if self.is_main:
            print(*values, flush=True)

    def log(self, **metrics: Any) -> None:
        """Print metrics in a line on rank 0, and record them if the Lab has a `run_dir`.

        They are recorded as a row of metrics.jsonl and by the trackers. A row with a value `epoch`
        is that of an epoch, one with a value `step` that of a step. A recorded epoch counts from
        1, as those that `Trainer.fit` logs: pass epoch + 1 in a loop over `range(epochs)`.

        Args:
            metrics: numbers, or tensors of one element, by name. A tensor on a GPU is waited for.
        """
        self._log.log(**metrics)

    def trainer(
        self,
        model: nn.Module,
        loss: LossFunction | Task,
        optimizer: Callable[..., torch.optim.Optimizer],
        batch_size: int,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        example: Any = None,
        *,
        schedule: Callable[[int], float] | None = None,
        ema: float | None = None,
        ema_warmup: bool = True,
        num_workers: int = 0,
        loss_over_batch: bool = False,
        targets: str | int | None = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        checkpoint_activations: Checkpointing = "none",
        metrics: Sequence[Any] | Mapping[str, Any] = (),
        callbacks: Sequence[Hook | type[Hook]] = (),
        readers: int = 1,
    ) -> Trainer:
        """Place a model on the devices, as the strategy does, and return what trains it.

        Collective.

        Args:
            model: model that was constructed within the Lab, so that it is the same on every rank.
                Inputs that are a tuple are its arguments, those that are a dict its keywords. The
                strategy may change it.
            loss: a task; or a function of (outputs, targets), which returns unreduced losses of any
                shape [b, ...], or (losses, weights) of one shape. The loss of a step is
                sum(losses * weights) / sum(weights) over the GLOBAL batch. A function gets outputs
                as the model returns them; a task of ddp_lab takes one tensor, [b, ...], or the part
                `logits` of other outputs.
            optimizer: function of parameters that returns their optimizer, for example
                partial(torch.optim.AdamW, lr=1e-3).
            batch_size: number of samples in the GLOBAL batch; divisible by the number of replicas.
            accumulate: number of gradient-accumulation steps, in which each local batch is
                computed.
            max_grad_norm: largest L2 norm of the complete model's gradient; None: no clipping.
            example: a sample of the dataset, without the batch dimension. Model and loss are
                tried with it before anything starts, and parameters that the model does not use
                are frozen. Strategies that cut a model into blocks need a sample or its input.
                With a sample DDP on more than two ranks also resumes to the last bit.
            schedule: function of the number of optimizer steps that are done, 0 in the first one,
                which returns the factor of the learning rate; None: it stays as it is, and a loop
                may change it in `trainer.optimizer`, also by a scheduler of torch.
            ema: decay per step of averages of the weights, from 0 to 1, which are evaluated and
                saved in place of the weights; None: no averages.
            ema_warmup: whether the decay of the step after t others is
                min(ema, (1 + t) / (10 + t)).
            num_workers: number of processes of each rank that read a dataset which is not a torch
                TensorDataset; 0: the rank itself reads it.
            loss_over_batch: whether a loss that compares the samples of a batch, such as a
                contrastive loss, may be computed over each local batch or micro-batch. False: such
                a loss is refused where the batch is divided, now if `example` is a complete
                sample, else in the first step.
            targets: which part of a sample is the target: an index of a tuple or a key of a dict.
                None: the loss depends on the outputs alone. The other parts are the inputs.
            collate_fn: function of a list of samples that returns their batch, for example padded
                to the longest one: tensors [b, ...] in the form of a sample. None: the samples are
                stacked.
            checkpoint_activations: what the backward pass computes again instead of keeping it:
                nothing (none), or the forward pass of each block (block), which saves memory and
                costs about a third of a step. Blocks are those of a Chain, or the elements of the
                model's lists of modules.
            metrics: metrics of torchmetrics, instances or classes, in a list or in a dict by name.
                `evaluate` and `fit` compute them over the complete set, and report them by the
                names of their classes, AUROC as auroc, or by those of the dict. A task says what
                they get (`metric_inputs`): probabilities in classification; here outputs and
                targets for a function.
            callbacks: instances or classes of `ddp_lab.Hook`, which `fit` calls on all ranks.
            readers: number of parts of a stream that are read in turn, by its method
                shard(num, index). The order of the samples depends on it.

        Returns:
            The trainer. It is closed when the `with` block of the Lab ends.

        Raises:
            ConfigError: an argument is not allowed with this strategy, model or number of ranks;
                or the ranks have constructed different models; or model or loss fail for the
                example.
        """
        runtime = self.runtime
        require_module(model)
        sizes = {"batch_size": batch_size, "accumulate": accumulate, "num_workers": num_workers}
        averaging = {"ema": ema, "ema_warmup": ema_warmup}
        others = {
            "max_grad_norm": max_grad_norm,
            "loss_over_batch": loss_over_batch,
            "targets": targets,
            "checkpoint_activations": checkpoint_activations,
            "readers": readers,
        }
        validate(TrainerKeys, {**sizes, **averaging, **others})
        further_metrics = make_further_metrics(metrics, batch_size)
        further_hooks = make_further_hooks(callbacks)
        named = {"metrics": [*further_metrics.metrics] if further_metrics else []}
        self._calls.begin("called lab.trainer", {**sizes, **averaging, **others, **named})
        strategy: Strategy = construct("strategy", self._strategy, runtime)
        if batch_size % strategy.replicas:
            raise ConfigError(
                f"batch_size={batch_size}: is the global batch and must be divisible by the "
                f"{strategy.replicas} replicas that share it; use "
                f"{multiples(batch_size, strategy.replicas)}"
            )
        given_collate_fn: Any = collate_fn  # what a user passes may be something else
        if given_collate_fn is not None and not callable(given_collate_fn):
            raise ConfigError(
                f"collate_fn={given_collate_fn}: must be a function of a list of samples, or None"
            )
        parts = Parts(targets, collate_fn)
        task = as_task(loss)
        prepared = prepare_model(
            Division(strategy, batch_size, accumulate),
            model,
            task,
            find_example(example, parts),
            checkpoint_activations,
            over_batch=loss_over_batch,
        )
        step = StepOptions(accumulate, max_grad_norm, seed=self.seed)
        scheduler = KeptRates if schedule is None else partial(OwnSchedule, lr_lambda=schedule)
        recipe = Recipe(
            batch_size=batch_size,
            optimizer=optimizer,
            scheduler=scheduler,
            step=step,
            ema=ema,
            ema_warmup=ema_warmup,
        )
        options = LoopOptions(
            model=model,
            shapes=prepared.shapes,
            logger=self._log,
            calls=self._calls,
            num_workers=num_workers,
            readers=readers,
            parts=parts,
            number=next(self._numbers),
            pretrained=prepared.pretrained,
            metrics=further_metrics,
            callbacks=further_hooks,
            folders=self._folders,
        )
        with print_if_slow("placing the model on its devices", self.is_main):
            trainer = Trainer(strategy, prepared.module, task, recipe, options)
        self._trainers.add(trainer)
        return trainer

    def verify(
        self,
        model: nn.Module,
        loss: LossFunction | Task,
        dataset: Any,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        *,
        targets: str | int | None = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        nproc: int = 4,
        only: Sequence[str] = (),
    ) -> Any:
        """Compare what the strategies compute with what one device computes, as `ddp-lab verify`.

        It starts ranks on the CPU, which train a copy of the model for three steps, the last one on
        a partial batch. Call it in a script of one process, before `trainer`.

        Args:
            model: on the CPU; it stays as it is.
            loss: as for `trainer`.
            dataset: map-style dataset, as for `Trainer.batches`.
            optimizer: as for `trainer`; None: SGD with momentum.
            accumulate: number of gradient-accumulation steps.
            max_grad_norm: largest L2 norm of the complete model's gradient; None: no clipping.
            targets: which part of a sample is the target, as for `trainer`.
            collate_fn: makes a batch of a list of samples, as for `trainer`.
            nproc: the most ranks, 2 or 4.
            only: names of the strategies to compare, besides that of the Lab; empty: all.

        Returns:
            A report: `print(report)` shows a row for each strategy, `report.ok` is whether nothing
                differs, and `report.rows` are the rows.

        Raises:
            ConfigError: an argument is not allowed; the ranks cannot be started here; or the
                training is not the same twice on one device.
        """
        # by name, because the library is below the subpackage of proofs
        proof: Any = importlib.import_module("ddp_lab.proof.verify_lab")
        run = proof.LabRun(
            model=model,
            loss=loss,
            dataset=proof.few_samples(dataset, accumulate),
            optimizer=optimizer or partial(torch.optim.SGD, lr=0.01, momentum=0.9),
            accumulate=accumulate,
            targets=targets,
            collate_fn=collate_fn,
            seed=self.seed,
        )
        return proof.verify_lab(self, run, max_grad_norm, nproc, tuple(only))


def call_all(*functions: Callable[[], object]) -> Exception | None:
    """Call all functions, whatever one of them raises; return the first exception."""
    first = None
    for function in functions:
        try:
            function()
        except Exception as error:
            first = first or error
    return first
