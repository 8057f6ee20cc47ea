"""The hooks that save checkpoints, compare replicas and stop a training run."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ddp_lab.checkpoints.checkpoints import Checkpoints
from ddp_lab.config.errors import TrainingError
from ddp_lab.observe.log import log
from ddp_lab.resilience.decisions import Decisions
from ddp_lab.resilience.replicas import first_difference
from ddp_lab.resilience.watchdog import Watchdog
from ddp_lab.strategies.sharding import local
from ddp_lab.training.loop import Hooks
from ddp_lab.training.progress import Progress


class Preempted(Exception):
    """The run was preempted, and a checkpoint of the current step is being written."""


@dataclass(eq=False)
class Guard(Hooks):
    """The hooks of the training loop that save checkpoints, compare replicas and stop the run.

    All ranks make the same decision to stop. The methods then raise Preempted on all ranks if a rank received a signal to stop,
    while a checkpoint of this step is being written, or TrainingError if a loss or a weight is not finite, the replicas differ,
    or a checkpoint could not be written.

    Attributes:
        checkpoints: where and how checkpoints are written.
        decisions: begun for the steps of this launch.
        watchdog: gets the phases.
        progress: the progress of the last checkpoint, or at the start of this launch.

    The others are the config keys of these names, most of them in the group `checkpoint`.
    """

    checkpoints: Checkpoints
    decisions: Decisions
    watchdog: Watchdog
    progress: Progress
    every_epochs: int
    every_steps: int | None
    on_error: Literal["stop", "continue"]
    on_nan: Literal["stop", "skip"]
    check_replicas: int | None
    at_steps: Collection[int]

    def batches(self, doing: str, loader: Iterable[Any], progress: Progress) -> Iterator[Any]:
        """Yield the loader's batches and update the heartbeat at each batch. `doing` is "training" or "evaluating"."""
        self.watchdog.at("loading", progress.epoch, progress.step + 1)
        for batch in loader:
            self.watchdog.at(doing, progress.epoch, progress.step + 1)
            yield batch
            self.watchdog.at("loading", progress.epoch, progress.step + 1)

    def after_step(self, progress: Progress, here: Callable[[], Progress]) -> None:
        """Stop the run, compare the replicas and save a checkpoint, if it is due after this step. Collective.

        Args:
            progress: the progress after the step, but with the sums at the start of the epoch or of this launch.
            here: returns `progress` with the current sums. Collective; waits for the device.
        """
        if self.decisions.due(progress.step) and self._must_leave(progress.step, progress):
            self.save(here())
        if self.check_replicas and progress.step % self.check_replicas == 0:
            self._compare_replicas(progress.step)
        if (self.every_steps and progress.step % self.every_steps == 0) or progress.step in self.at_steps:
            self.save(here())

    def evaluating(self, loader: Iterable[Any], progress: Progress, done: int = 0) -> Iterator[Any]:
        """Yield the batches of an evaluation and check for a preemption after each one.

        A preemption therefore does not wait for the end of a long evaluation; the next launch repeats the evaluation.
        """
        for number, batch in enumerate(self.batches("evaluating", loader, progress), progress.step + done + 1):
            yield batch
            if self.decisions.due(number) and self._must_leave(number, progress):
                self.save(progress)

    def check(self, progress: Progress) -> None:
        """Make all pending decisions about the steps so far. Collective; waits for the device.

        Args:
            progress: the progress after the last step, with the sums of the epoch.
        """
        if self._must_leave(progress.step, progress):
            self.save(progress)

    def end_epoch(self, progress: Progress, last: bool) -> None:
        """Save a checkpoint after an evaluation if one is due or the best. `progress` is at the beginning of the next epoch."""
        due = last or (progress.epoch - 1) % self.every_epochs == 0
        if due or progress.is_best(self.checkpoints.best):
            self.save(progress)
        else:
            self.check(progress)

    def finish(self) -> None:
        """Wait until the last checkpoint is written."""
        self.watchdog.at("finishing")
        self.checkpoints.wait()
        self._must_leave(self.progress.step, self.progress)

    def save(self, progress: Progress) -> None:
        """Save a checkpoint. Collective; waits for the device.

        Args:
            progress: the progress in the checkpoint.
        """
        # Weights that are not finite must not be saved.
        weights = [local(tensor) for tensor in self.checkpoints.state.strategy.module.state_dict().values()]
        leave = self._must_leave(progress.step, progress, weights)
        self.progress = progress
        self.watchdog.at("saving")
        self.checkpoints.save(progress)
        if leave:
            raise Preempted

    def _compare_replicas(self, step: int) -> None:
        state = self.checkpoints.state
        if difference := first_difference(state.strategy, state.ema.averages if state.ema else {}):
            name, replica = difference
            raise TrainingError(
                f"the replicas have drifted apart: after step {step} {name} differs between replicas 0 and {replica} "
                f"(check_replicas={self.check_replicas}). Look for code that changes it on one rank only, or for a "
                "faulty device. The last checkpoint contains the values of replica 0",
                "replicas_drifted",
            )

    def _must_leave(self, step: int, progress: Progress, weights: Collection[torch.Tensor] = ()) -> bool:
        """Make all decisions about the steps up to `step`, and return whether the run is preempted. Waits for the device."""
        self.watchdog.at("deciding")
        agreed = self.decisions.exchange(step, self.checkpoints.problem is not None, weights)
        if agreed.not_finite:
            bad, rank = agreed.not_finite
            what = f"the loss of step {bad} (epoch {progress.epoch}) is not finite, on rank {rank} first"
            if self.on_nan == "stop":
                raise TrainingError(
                    f"{what}. The last checkpoint is from an earlier step. Lower optimizer.lr, set max_grad_norm, or use "
                    "on_nan=skip, with which the gradient of such a batch counts as zero",
                    "not_finite",
                    rank,
                )
            if self.watchdog.rank == 0:
                log.warning(f"{what}; its gradient counts as zero (on_nan=skip)")
        if agreed.weights_not_finite:
            raise TrainingError(
                f"after step {progress.step} some weights are not finite; they are not saved. Lower "
                "optimizer.lr or set max_grad_norm",
                "not_finite",
            )
        if agreed.save_failed and self.on_error == "stop":
            raise TrainingError(
                f"{self.checkpoints.problem or 'a checkpoint could not be written (the reason is in train.log)'}. "
                "With checkpoint.on_error=continue training continues after such a failure",
                "checkpoint",
            )
        return agreed.preempted
