"""A model with its optimizer under a strategy: the methods from which a loop of the user's own is made."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ddp_lab.checkpoints.checkpoints import Checkpoints
from ddp_lab.checkpoints.state import State
from ddp_lab.config.errors import ConfigError
from ddp_lab.lab.files import on_rank_0, write_weights
from ddp_lab.lab.local_batches import LocalBatches, padded
from ddp_lab.observe.logger import Logger
from ddp_lab.tasks.base import Task
from ddp_lab.training.loop import FitSettings, Hooks, Parts, fit
from ddp_lab.training.metrics import evaluate
from ddp_lab.training.progress import Progress
from ddp_lab.training.step import Step, StepOptions


class Trainer:
    """Trains, evaluates and saves a model. Every method is collective: all ranks call it, with their own part of a batch.

    Args:
        state: the strategy after `setup`, the optimizer of its parameters, the schedule, the averages of the weights, the seed.
        options: of a step.
        batch_size: samples in the GLOBAL batch; divisible by the number of replicas.
        num_workers: processes of each rank that read a dataset which is not a torch TensorDataset; 0: the rank itself.
        log: called with the metrics of every epoch of `fit`; None: they are not shown.

    Attributes:
        strategy, optimizer, scheduler: those of `state`.
        progress: the position: epoch, samples of it over all ranks, and steps since the beginning.
    """

    def __init__(
        self,
        state: State,
        options: StepOptions,
        batch_size: int,
        num_workers: int = 0,
        log: Callable[..., object] | None = None,
    ):
        self.state, self.batch_size, self.log = state, batch_size, log
        self.strategy, self.optimizer, self.scheduler = state.strategy, state.optimizer, state.scheduler
        self.progress = Progress(epoch=0)
        self._step = Step(state.strategy, state.optimizer, state.scheduler, options, state.ema)
        self._batches = LocalBatches(state.strategy, batch_size, state.seed, num_workers)
        self._checkpoints: dict[Path, Checkpoints] = {}
        self._resumed = False

    def batches(self, dataset: Any, epoch: int, shuffle: bool = True) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this rank's inputs and targets of every global batch of an epoch, on its device.

        The global batches are the same for any number of ranks. Of the last one, which may be partial, a rank may have fewer
        samples than others, or none. After `resume` the first call begins where the epoch was left.

        Args:
            dataset: map-style, of (input, target): tensors of any shape and dtype. uint8 images [channels, height, width]
                become floats in [0, 1].
            epoch: determines the order, and what the dataset draws at random.
            shuffle: whether every epoch has a random order.

        Raises:
            ConfigError: the dataset has no length, is empty, or its samples are no pairs.
        """
        resumes = self._resumed and epoch == self.progress.epoch
        self._resumed = False
        loader = self._batches.loader(dataset, "shuffled" if shuffle else "ordered")
        yield from self._batches.iterate(loader, epoch, self.progress.samples if resumes else 0)
        if self.progress.epoch == epoch and self.progress.samples == loader.data.size:
            self.progress = self.progress.next_epoch({})

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Train on a global batch: forward, backward, clipping, the optimizer and the schedule.

        Args:
            inputs, targets: this rank's part of a batch from `batches`, or of another batch of batch_size samples.

        Returns:
            The mean loss over the GLOBAL batch before the step, [], the same on every rank. Later steps do not change it.

        Raises:
            ConfigError: the local batch has another size.
        """
        batch, handed = self._batches.padded(inputs, targets)
        strategy = self.strategy
        if not strategy.module.training:
            strategy.train()
        self._step(batch)
        self.progress.step += 1
        if handed:
            self.progress.epoch, self.progress.samples = handed.epoch, handed.samples
        own = self._step.sums
        loss, *_, weight = strategy.runtime.all_reduce(own.clone() if strategy.is_metric_rank else torch.zeros_like(own))
        return loss / weight

    def fit(self, train: Any, validation: Any, epochs: int, task: Task | None = None) -> dict[str, float]:
        """Train until `epochs` epochs are done, which are counted from 1, and evaluate after each. It continues after `resume`.

        Args:
            train, validation: datasets, as for `batches`.
            epochs: number of the last epoch.
            task: whose metrics are computed; None: those of the task that is the trainer's loss, if it is one.

        Returns:
            The metrics of the last epoch by name, train_* and val_*; none if no epoch was left.
        """
        loaders = {
            "train": self._batches.loader(train, "shuffled"),
            "val": self._batches.loader(validation, "evaluation"),
        }
        records = Records(self.log)
        parts = Parts(self.strategy, self._step, loaders, FitSettings(epochs), self.state.ema, self._on_device(task))
        self._resumed = False
        self.progress = fit(parts, records, Hooks(), self.progress if self.progress.step else Progress())
        return records.last

    def evaluate(self, dataset: Any, task: Task | None = None) -> dict[str, float]:
        """Return the mean loss and the metrics over a dataset, in which every sample counts once.

        Args:
            dataset: as for `batches`.
            task: whose metrics are computed; None: those of the task that is the trainer's loss, if it is one.
        """
        with self._averages():
            return evaluate(self.strategy, self._batches.loader(dataset, "evaluation"), self._on_device(task)).values

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the model in evaluation mode, without gradients.

        Args:
            inputs: this rank's own, [b, ...], of any number. Ranks that share a model (pipeline, tp) need the same ones.
        """
        inputs = inputs.to(self.strategy.device)
        with self._averages():
            self.strategy.train(False)
            return self.strategy.predict(padded(inputs, max(1, len(inputs))))[: len(inputs)]

    def save(self, path: str | Path) -> None:
        """Write the weights of the complete model as safetensors: their averages if the weights are averaged.

        Raises:
            ConfigError: the file cannot be written.
        """
        state = self.state.ema.state_dict() if self.state.ema else self.strategy.model_state()

        names = self.state.shapes
        on_rank_0(self.strategy.runtime, path, lambda: write_weights({name: state[name] for name in names}, Path(path)))

    def checkpoint(self, folder: str | Path) -> None:
        """Write model, optimizer, schedule and position into `folder`, as a run of ddp_lab does; the two newest are kept.

        A checkpoint can be resumed by any strategy and any number of ranks. It is written when this returns.

        Raises:
            ConfigError: the file cannot be written.
        """
        folder = Path(folder)
        on_rank_0(self.strategy.runtime, folder, lambda: folder.mkdir(parents=True, exist_ok=True))
        checkpoints = self._checkpoints_in(folder)
        checkpoints.save(self.progress)
        checkpoints.wait()
        if problem := self.strategy.runtime.agree("checkpoint", lambda: checkpoints.problem):
            raise ConfigError(problem)

    def resume(self, folder: str | Path) -> tuple[int, int]:
        """Load the newest checkpoint in `folder`. The next call of `batches` for its epoch, or of `fit`, continues there.

        Returns:
            The epoch, and the number of its steps that are done; (0, 0) if there is no checkpoint yet.

        Raises:
            ConfigError: the checkpoint is damaged, or is that of another model or optimizer.
        """
        checkpoints = self._checkpoints_in(Path(folder))
        progress = checkpoints.resume(checkpoints.folder, lambda found: found.step)
        self.progress = progress if progress.step else Progress(epoch=0)
        self._resumed = True
        return self.progress.epoch, math.ceil(self.progress.samples / self.batch_size)

    def _checkpoints_in(self, folder: Path) -> Checkpoints:
        folder = folder.resolve()
        if folder not in self._checkpoints:
            self._checkpoints[folder] = Checkpoints(folder, self.state)
        return self._checkpoints[folder]

    def _averages(self) -> AbstractContextManager[None]:
        return self.state.ema.in_use() if self.state.ema else nullcontext()

    def _on_device(self, task: Task | None) -> Task | None:
        return task if task is None else task.to(self.strategy.device)


class Records(Logger):
    """The metrics of the last epoch of `fit`.

    Args:
        log: called with those of every epoch.
    """

    def __init__(self, log: Callable[..., object] | None):
        self.log, self.last = log, dict[str, float]()

    def epoch(self, epoch: int, **metrics: float) -> None:
        self.last = metrics
        if self.log:
            self.log(epoch=epoch, **metrics)
