"""The trainer of a Lab: the methods from which a loop of one's own is made."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddp_lab.checkpoints.state import Shapes, State
from ddp_lab.config.check import validate
from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.config.types import Every
from ddp_lab.data.sources import Reading
from ddp_lab.data.trees import pad, require_one_size, require_tensors, to
from ddp_lab.lab.arguments import FitKeys, require_same_form
from ddp_lab.lab.calls import Calls, CountedSteps
from ddp_lab.lab.example import Parts
from ddp_lab.lab.local_batches import CurrentBatch, LocalBatches
from ddp_lab.lab.log import LabLogger
from ddp_lab.lab.loop_position import LoopPosition
from ddp_lab.lab.model_mistakes import mistakes_reported
from ddp_lab.lab.own_loop import OwnLoop
from ddp_lab.lab.pretrained import Pretrained
from ddp_lab.lab.trainer_files import TrainerFiles
from ddp_lab.models.outputs import map_outputs, require_samples
from ddp_lab.strategies.base import Strategy, total
from ddp_lab.strategies.parameter_hooks import LateHooks
from ddp_lab.tasks.base import Task
from ddp_lab.training import trainer as training
from ddp_lab.training.hooks import Exchanges, Hook, Run, close_all
from ddp_lab.training.loop import fit
from ddp_lab.training.meter import Meter
from ddp_lab.training.metrics import evaluate
from ddp_lab.training.not_finite import NotFiniteNotes
from ddp_lab.training.plan import FitSettings, StepLimit
from ddp_lab.training.progress import Progress
from ddp_lab.training.sync import Sync
from ddp_lab.training.trainer import Recipe

if TYPE_CHECKING:
    from ddp_lab.training.callbacks import Callback
    from ddp_lab.training.gathered_metrics import GatheredMetrics


# attributes of a trainer, which its steps have, too
FIXED = ("strategy", "optimizer", "scheduler", "ema")


@dataclass(frozen=True)
class LoopOptions:
    """What a loop in a Lab needs, besides what a run of train.py does.

    Attributes:
        model: of the user, of which the strategy may call the blocks only.
        shapes: the shape of each tensor of the complete model, by name.
        logger: the logger of the Lab.
        calls: of this rank.
        num_workers: processes of each rank that read a dataset which is not a torch TensorDataset;
            0: the rank itself.
        readers: number of parts of a stream that are read in turn.
        parts: how samples become batches.
        number: of the trainer in its Lab, from 0.
        pretrained: how the library of the model saves it; None: it has no such way.
        metrics: of evaluations, besides those of the task; None: there are none.
        callbacks: of the user, which `fit` calls.
        folders: those of checkpoints, with the number of the trainer of the Lab that writes there.
    """

    model: nn.Module
    shapes: Shapes
    logger: LabLogger
    calls: Calls
    num_workers: int
    readers: int
    parts: Parts
    number: int
    pretrained: Pretrained | None
    metrics: "GatheredMetrics | None"
    callbacks: "Sequence[Callback]"
    folders: dict[Path, int]


class Trainer(OwnLoop, training.Trainer):
    """Trains, evaluates and saves a model.

    `Lab.trainer` constructs it. Every method is collective: all ranks call it, with their own part
    of a batch.

    Args:
        strategy: the strategy, after `partition`.
        model: the complete model, as for `Strategy.setup`.
        task: what the model is trained for, with the loss.
        recipe: how the weights are updated.
        options: what only a loop in a Lab needs.

    Attributes:
        strategy: the strategy, after `setup`. Its `module` is what this rank holds of the model.
        optimizer: the optimizer of the parameters that this rank holds.
        scheduler: the schedule of the learning rate.
        ema: the averages of the weights; None without them.
        state: all of these, as checkpoints save them.
        eager_step: the training step in eager mode.
        logger: the logger of the Lab. It gets the metrics of every epoch of `fit`, and of steps
            within it.
    """

    def __init__(
        self, strategy: Strategy, model: nn.Module, task: Task, recipe: Recipe, options: LoopOptions
    ):
        super().__init__(strategy, model, task, recipe)
        self.batch_size = recipe.batch_size
        self.state = State.of(self, options.shapes)
        self._loop = LoopPosition()
        self.logger = options.logger
        self._calls = options.calls
        parts = options.parts
        reading = Reading(
            "the dataset", self.seed, targets=parts.targets, collate_fn=parts.collate_fn
        )
        self._batches = LocalBatches(
            strategy=strategy,
            batch_size=recipe.batch_size,
            reading=reading,
            num_workers=options.num_workers,
            readers=options.readers,
            accumulate=recipe.step.accumulate,
        )
        self._files = TrainerFiles(self.state, options.number, options.folders, options.pretrained)
        self._metrics = options.metrics
        self._callbacks = options.callbacks
        self._late_hooks = LateHooks(strategy, options.model)
        self._notes = NotFiniteNotes(strategy.runtime.is_main)
        # What the model's `training` was after the last switch to training; None: an evaluation or
        # the beginning of a loop came after it.
        self._training: bool | None = None
        self.prepare_own_steps(options.number)

    def __setattr__(self, name: str, value: object) -> None:
        if name in FIXED and name in vars(self):
            raise ConfigError(
                f"trainer.{name}: cannot be replaced, because the steps use the one that "
                "lab.trainer has made. Change trainer.optimizer.param_groups, or construct another "
                "trainer"
            )
        super().__setattr__(name, value)

    @property
    def progress(self) -> Progress:
        """The position: `epoch`, `samples` of it so far, over all ranks, and `step`s of the run.

        The epoch counts from 0. It is the next argument of `batches`, and the number of epochs
        that are done.
        """
        return self._loop.from_0

    @property
    def position(self) -> Progress:
        """The position as checkpoints and the log have it, with the epoch counted from 1.

        A loop reads `progress`.
        """
        return self._loop.progress

    @position.setter
    def position(self, progress: Progress) -> None:
        self._loop.progress = progress

    def close(self) -> None:
        """End the processes that read datasets. A Lab calls it when its `with` block is left."""
        self._batches.close()

    def batches(self, dataset: Any, epoch: int, shuffle: bool = True) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's part of every global batch of an epoch, on its device.

        The global batches are the same for any number of ranks. Of the last one, which may be
        partial, a rank may have fewer samples than others, or none. After `resume` the first call
        for the epoch of the checkpoint begins where it was left.

        Args:
            dataset: map-style dataset of (input, target), or a stream, an IterableDataset, whose
                batches have no end: tensors of any shape and dtype, without the batch dimension.
                uint8 images, [channels, height, width], become floats in [0, 1]. Either may be a
                tuple or dict of tensors. With `targets` or `collate_fn` of the trainer samples have
                another form.
            epoch: number of the epoch, from 0. It determines the order of the samples, and what
                the dataset draws at random. A stream has epoch 0 only.
            shuffle: whether every epoch has a random order. A stream keeps its own.

        Yields:
            Inputs and targets of the local batch, [b, ...], where b is batch_size / replicas
                except in the last batch: tensors, or tuples or dicts of them. Targets are None with
                `targets=None`.

        Raises:
            ConfigError: the dataset has no length, is empty, or its samples have no such parts; or
                a stream has another epoch than 0, or another order than that of the checkpoint.
            SampleError: the dataset cannot return a sample; on the rank that reads it.
        """
        order = epoch + self._loop.first_order(0)
        resumes = self._loop.resumes_in(order)
        start = self.position.samples if resumes else 0
        self._training = None
        loader = self._batches.loader(dataset, "shuffled" if shuffle else "ordered")
        if loader.data.is_endless and epoch:
            raise ConfigError(
                f"epoch={epoch}: a stream has no epochs: it begins again at its end. Use epoch=0, "
                "and end the loop after a number of steps"
            )
        self._loop.begin_stream(loader, resumes)
        self._calls.begin(
            "called batches",
            {"epoch": epoch, "shuffle": shuffle, "the length of the dataset": loader.data.size},
        )
        self._loop.is_resumed = False
        yield from self._batches.iterate(loader, order, start)
        self._loop.end_epoch(order, loader.data.size)

    def step(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Train on a global batch: forward, backward, clipping, the optimizer and the schedule.

        Args:
            inputs: this rank's part of a batch from `batches`, [b, ...]; or of another batch of
                batch_size samples, of which it has batch_size / replicas. A tuple of tensors is
                passed as `model(*inputs)`, a dict as `model(**inputs)`.
            targets: targets of the same samples, [b, ...], or a tuple or dict of such tensors; None
                for a loss of the outputs alone.

        Returns:
            The mean loss over the GLOBAL batch before the step, [], the same on every rank, on its
                device. Later steps do not change it. It is 0 if the batch has no weight, because
                all its targets are ignored.

        Raises:
            ConfigError: the local batch has another size, or parts of different sizes; or, in the
                first step, the loss is not a sum over samples and the batch is divided
                (`loss_over_batch`).
            TrainingError: the shapes of outputs, targets and losses do not fit together.
            SampleError: the targets of this rank are not what the task needs.
        """
        self._own_step.require_ended("step")
        batch, current = self._batches.padded(inputs, targets)
        strategy = self.strategy
        if strategy.task.labels is not None:
            # of a loop's own batches, which no loader has read
            strategy.task.labels.add_from(targets)

        self._begin_step(current)
        with mistakes_reported(self.strategy):
            self.eager_step(batch)
        self.eager_step.seed_alike()
        self._loop.count_step(current)
        loss, *_, weight = total(strategy, self.eager_step.sums)
        return torch.where(weight == 0, 0, loss / weight)

    def _begin_step(self, current: CurrentBatch | None) -> None:
        """Begin a step, in training mode.

        Args:
            current: batch of `batches` that is trained on; None: another one.
        """
        epoch = self.progress.epoch + 1 + self._loop.epochs_ahead(current)
        self._calls.begin_step(self.position.step + 1, epoch)
        self._set_training()

    def _set_training(self) -> None:
        strategy = self.strategy
        if strategy.module.training is not self._training:
            self._late_hooks.take()
            strategy.train()
            self._training = strategy.module.training

    def fit(
        self,
        train: Any,
        validation: Any,
        epochs: int | None = None,
        task: Task | None = None,
        log_every: int | str | None = None,
        *,
        max_steps: int | None = None,
    ) -> dict[str, float]:
        """Train until `epochs` epochs or `max_steps` steps are done in total, and evaluate after
        each epoch, if there is a validation set.

        Epochs of a loop over `batches`, and those before `resume`, count. The metrics of each epoch
        are logged; the rows count epochs from 1.

        Args:
            train: dataset to train on, as for `batches`. Of a stream the training is one epoch,
                which max_steps ends.
            validation: dataset to evaluate on after each epoch, as for `batches`; None: there is
                none, and no `val_...` metrics.
            epochs: number of epochs in total; None: max_steps ends the training.
            task: task whose metrics are computed; None: the task that is the trainer's loss, if it
                is one.
            log_every: when to log the metrics within an epoch, too: every N steps, for example
                100, or seconds, for example "10s"; None: never.
            max_steps: number of steps in total, after which the training ends, also within an
                epoch; None: no such limit.

        Returns:
            The metrics of the last epoch by name, `train_...` and `val_...`; none if no epoch was
            left.

        Raises:
            ConfigError: an argument is not allowed, or a dataset is none.
            TrainingError: no batch of an epoch has a weight, because all its targets are ignored,
                or the shapes of outputs, targets and losses do not fit together.
            SampleError: a dataset cannot return a sample; on the rank that reads it.
        """
        self._own_step.require_ended("fit")
        limits = {"epochs": epochs, "max_steps": max_steps}
        validate(FitKeys, {"log_every": log_every, **limits})
        if epochs is None and max_steps is None:
            raise ConfigError("fit: the training would have no end. Set epochs or max_steps")
        settings = FitSettings(
            epochs,
            log_every=Every.parse(log_every) or Every(),
            limits=() if max_steps is None else (StepLimit("max_steps", max_steps, max_steps),),
        )
        loaders = {"train": self._batches.loader(train, "shuffled", "train")}
        if loaders["train"].data.is_endless and (epochs is not None or max_steps is None):
            raise ConfigError(
                f"epochs={epochs}: a stream has no epochs: it begins again at its end. Use "
                "max_steps, and leave epochs out"
            )
        self._loop.begin_stream(loaders["train"], resumes=self._loop.is_resumed)
        lengths = {"the length of the training dataset": loaders["train"].data.size}
        if validation is not None:
            loaders["val"] = self._batches.loader(validation, "evaluation", "validation")
        lengths["the length of the validation dataset"] = (
            loaders["val"].data.size if "val" in loaders else 0
        )
        self._calls.begin(
            "called fit",
            {"log_every": log_every, **limits, **lengths},
        )
        self._loop.is_resumed = False
        self._loop.first_order(1)
        if not self.position.sums:
            # A loop was left after the last step of an epoch, of which nothing is left to train.
            self._loop.end_epoch(self.position.order, loaders["train"].data.size)
        self.logger.begin()
        step = self.eager_step

        hooks: list[Hook] = [CountedSteps(self._calls)]
        read = None
        if settings.log_every != Every():
            meter = Meter(self.strategy.task, settings, self.logger)
            read = meter.read
            hooks += [Exchanges(), meter]

        if self._metrics is not None:
            from ddp_lab.training.metrics_trial import MetricsTrial

            hooks.append(MetricsTrial(self._metrics))
        for callback in self._callbacks:
            callback.use_folder(self.logger.run_dir)
            hooks.append(callback)
        sync = Sync(self.strategy, step.running_sums, settings.log_every, read=read)
        run = Run(
            eager=step,
            step=step,
            loaders=loaders,
            settings=settings,
            logger=self.logger,
            hooks=hooks,
            sync=sync,
            position=self.position,
            notes=self._notes,
            task=self._on_device(task),
            metrics=self._metrics,
        )
        self._training = None
        self._late_hooks.take()

        with mistakes_reported(self.strategy):
            self.position = self._fit(run)
        step.seed_alike()
        return self.logger.last_epoch

    def _fit(self, run: Run) -> Progress:
        """Train, and close the callbacks."""
        try:
            position = fit(run)
            close_all(self._callbacks, "finished")
        except TrainingError:
            close_all(self._callbacks, "failed")
            raise
        return position

    def evaluate(self, dataset: Any, task: Task | None = None) -> dict[str, float]:
        """Return the mean loss and the metrics over a dataset, in which every sample counts once.

        With averaged weights (`ema`) these are evaluated.

        Args:
            dataset: dataset as for `batches`, complete on every rank.
            task: task whose metrics are computed; None: the task that is the trainer's loss, if it
                is one.

        Returns:
            `loss`, the metrics of the task and those of the argument `metrics` of `lab.trainer`, by
                name, the same on every rank.

        Raises:
            ConfigError: the dataset has no length, is empty, or its samples are no pairs.
            TrainingError: the shapes of outputs, targets and losses do not fit together.
            SampleError: the dataset cannot return a sample; on the rank that reads it.
        """
        self._own_step.require_ended("evaluate")
        self._training = None
        self._late_hooks.require_none_on_model()
        loader = self._batches.loader(dataset, "evaluation")
        self._calls.begin("called evaluate", {"the length of the dataset": loader.data.size})
        with self._averages(), mistakes_reported(self.strategy):
            evaluation = evaluate(
                self.strategy, loader, self._on_device(task), metrics=self._metrics
            )
        self._notes.check({"": evaluation})
        return evaluation.values

    def predict(self, inputs: Any) -> Any:
        """Return the outputs of the model in evaluation mode, without gradients.

        Args:
            inputs: inputs of this rank, [b, ...], or a tuple or dict of such tensors, on any
                device. Each rank may have another number of them, but ranks that share a model
                (pipeline, tp) need the same inputs.

        Returns:
            The outputs as the model returns them, [b, ...], on this rank's device.

        Raises:
            ConfigError: ranks that share a model got inputs of different shapes, or the model does
                not support them.
        """
        self._own_step.require_ended("predict")
        require_tensors("predict: inputs", inputs)
        samples = require_one_size("predict", inputs=inputs)
        self.strategy.require_inputs(inputs)
        inputs = to(inputs, self.strategy.device)
        self._training = None
        self._late_hooks.require_none_on_model()
        if communicates(self.strategy):
            self._calls.begin("called predict")

        require_same_form(inputs, self.strategy)
        with self._averages(), mistakes_reported(self.strategy):
            self.strategy.train(False)
            num_samples = max(1, samples)
            outputs = self.strategy.predict(pad(inputs, num_samples))
        if not isinstance(outputs, torch.Tensor):
            return outputs if samples else map_outputs(lambda tensor: tensor[:0], outputs)
        require_samples(outputs.shape, num_samples)
        return outputs[:samples]

    def save(self, path: str | Path) -> None:
        """Write the weights of the complete model as safetensors, for use without ddp_lab.

        With averaged weights (`ema`) the averages are written. Rank 0 writes the file under a
        temporary name and renames it. A model of transformers is written as its `from_pretrained`
        reads it, and of a model of PEFT the adapters alone.

        Args:
            path: file to write; its folder is made if necessary. Of a model of transformers or PEFT
                a directory, unless it ends with .safetensors.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._calls.begin("called save")
        self._files.save_weights(Path(path))

    def checkpoint(self, folder: str | Path) -> None:
        """Write model, optimizer, schedule and position into `folder`, as a run of train.py does.

        A checkpoint can be resumed by any strategy and any number of ranks. It is written when this
        returns. The two newest checkpoints in the folder are kept.

        Args:
            folder: folder of the checkpoints, which is made if necessary.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._own_step.require_ended("checkpoint")
        self._calls.begin("called checkpoint")
        self._files.save_checkpoint(Path(folder), self._loop.with_stream(self.strategy.runtime))

    def resume(self, folder: str | Path) -> tuple[int, int]:
        """Load the newest checkpoint in `folder`.

        The next call of `batches` for its epoch, or of `fit`, continues there.

        Args:
            folder: folder that was given to `checkpoint`.

        Returns:
            The epoch, counted from 0, which is also the number of epochs that are done, and the
                number of its steps that are done; (0, 0) if there is no checkpoint yet.

        Raises:
            ConfigError: the checkpoint is damaged, or is that of another model or optimizer.
        """
        self._own_step.require_ended("resume")
        self._calls.begin("called resume")
        self.eager_step.adopt_added_groups()
        self._loop.resume(self._files.load_newest(Path(folder)))
        if self.position.step:
            # what the loop draws then is what it would have drawn after that step
            self.eager_step.seed_alike()
        return self.progress.epoch, math.ceil(self.position.samples / self.batch_size)

    def _averages(self) -> AbstractContextManager[None]:
        return self.ema.in_use() if self.ema else nullcontext()

    def _on_device(self, task: Task | None) -> Task | None:
        return task if task is None else task.to(self.strategy.device)


def communicates(strategy: Strategy) -> bool:
    """Return whether the ranks need each other to predict: for parts of the model, or buffers.

    Args:
        strategy: after `setup`.
    """
    is_divided = strategy.sharded or strategy.dp_size < strategy.runtime.world_size
    has_buffers = any(True for _ in strategy.module.buffers()) or strategy.task.has_buffers
    return is_divided or has_buffers
