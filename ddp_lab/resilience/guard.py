"""The hook that saves checkpoints, compares replicas and stops a training run."""

import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from ddp_lab.checkpoints.checkpoints import Checkpoints
from ddp_lab.config.errors import TrainingError
from ddp_lab.observe.log import log
from ddp_lab.resilience.heartbeats import OwnHeartbeat
from ddp_lab.strategies.dtensor import local
from ddp_lab.training.hooks import Hook, Run
from ddp_lab.training.loop import stop_reasons
from ddp_lab.training.metrics import Evaluation
from ddp_lab.training.progress import Progress
from ddp_lab.training.sync import Exchanged
from ddp_lab.world.process import REQUESTS
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:
    from ddp_lab.observe.trackers.base import Status

# the indices of three of Guard.flags
OUT_OF_TIME = 2
SAVE = 3
INTERRUPTED = 4


class Preempted(Exception):
    """The run was preempted, and a checkpoint of the current step is being written."""


class Requests:
    """The requests to stop that this rank has received.

    Attributes:
        preempted: whether it received SIGTERM, SIGUSR1 or Ctrl-C.
        interrupted: whether it received Ctrl-C.
    """

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.preempted = False
        self.interrupted = False

    def listen(self) -> None:
        """Treat SIGTERM, SIGUSR1 and Ctrl-C as a request to save a checkpoint and exit.

        Call it in the main thread.
        """
        for number in REQUESTS:
            signal.signal(number, self._preempt)

    def _preempt(self, number: int, frame: object) -> None:
        # torchrun repeats the signal itself
        if number == signal.SIGINT and self.preempted and not self.runtime.under_torchrun:
            raise KeyboardInterrupt  # the second Ctrl-C exits immediately
        self.preempted = True
        self.interrupted = self.interrupted or number == signal.SIGINT


@dataclass(eq=False)
class Guard(Hook):
    """The hook that saves checkpoints, compares replicas and stops the run.

    All ranks make the same decision to stop. The methods then raise Preempted on all ranks if a
    rank received a signal to stop, while a checkpoint of this step is being written, or
    TrainingError if a loss or a weight is not finite, the replicas differ, or a checkpoint could
    not be written.

    Attributes:
        checkpoints: where and how checkpoints are written.
        requests: to stop, which this rank has received.
        heartbeat: gets the phases.
        saved: the position in the last checkpoint, or at the start of this launch.
        interrupted: whether any rank had received Ctrl-C when they last decided. A signal reaches
            some ranks a little later than others.

    The others are the config keys of these names, most of them in the group `checkpoint`.
    """

    checkpoints: Checkpoints
    requests: Requests
    heartbeat: OwnHeartbeat
    every_epochs: int
    every_steps: int | None
    every_minutes: float | None
    on_error: Literal["stop", "continue"]
    on_nan: Literal["stop", "skip"]
    check_replicas: int | None
    at_steps: Collection[int]
    saved: Progress = field(init=False)
    interrupted: bool = field(init=False, default=False)
    run: Run = field(init=False)
    _has_evaluated: bool = field(init=False, repr=False, default=True)

    def flags(self) -> tuple[bool, bool, bool, bool, bool]:
        """Return what this rank has to say.

        These are whether it was asked to stop, whether its last checkpoint failed, by the clock of
        rank 0 whether the run has trained for max_minutes and whether a checkpoint is due, and
        whether it received Ctrl-C.
        """
        failed = self.checkpoints.problem is not None
        is_due = False
        if self.every_minutes is not None and self.run.strategy.runtime.is_main:
            is_due = time.perf_counter() - self._saved_at >= 60 * self.every_minutes
        is_over = self.run.has_trained_long_enough()
        return self.requests.preempted, failed, is_over, is_due, self.requests.interrupted

    def on_start(self, run: Run) -> None:
        self.run = run
        self.sync = run.sync
        self.saved = run.position
        self._saved_at = time.perf_counter()
        self._size = run.loaders["train"].data.size
        self.heartbeat.at("loading", run.position.epoch, run.position.step + 1)

    def before_step(self, batch: object) -> object:
        position = self.run.position
        self.heartbeat.at("training", position.epoch, position.step + 1)
        return batch

    def on_step_end(self, position: Progress) -> None:
        """Stop the run, compare the replicas and save a checkpoint, if it is due after this step.

        Collective.
        """
        step = position.step
        if step >= self.sync.next:
            if self.sync.is_due(step):
                self.heartbeat.at("deciding")
            exchanged = self.sync.after_step(position, self.run.waited)
            if exchanged is not None:
                if exchanged.flags[OUT_OF_TIME]:
                    self.run.end_in_time()
                if self._must_leave(exchanged) or exchanged.flags[SAVE]:
                    self.save(self.run.current())

        if self.check_replicas and step % self.check_replicas == 0:
            self._compare_replicas(step)
        if (self.every_steps and step % self.every_steps == 0) or step in self.at_steps:
            self.save(self.run.current())
        if position.samples < self._size and step < self.run.ends_after:
            self.heartbeat.at("loading", position.epoch, step + 1)
            return

        if self._decide(step, position):
            self.save(self.run.current())
        self.heartbeat.at("evaluating", position.epoch, step + 1)

    def on_evaluation_batch(self, position: Progress, number: int) -> None:
        """Stop the run if it is preempted, without waiting for the end of a long evaluation.

        Collective.

        The next launch repeats the evaluation.
        """
        counted = position.step + number
        if self.sync.is_due(counted) and self._decide(counted, position):
            self.save(position)
        self.heartbeat.at("evaluating", position.epoch, position.step + 1)

    def on_evaluated(
        self, position: Progress, results: Mapping[str, Evaluation], seconds: float
    ) -> None:
        """Save a checkpoint if one is due, or the weights are the best so far. Collective.

        The exchanges that follow are counted from here, and not from the batches of the evaluation.
        """
        is_best = position.is_best(self.checkpoints.best)
        if is_best or self._decide(position.step, position):
            self.save(self.run.current())
        self.heartbeat.at("loading", position.epoch, position.step + 1)

    def on_evaluate(self, results: Mapping[str, Evaluation]) -> None:
        """Note whether anything was evaluated after the epoch."""
        self._has_evaluated = bool(results)

    def on_epoch_end(self, position: Progress) -> None:
        """Save a checkpoint after an evaluation if one is due or the best."""
        is_last = bool(stop_reasons(position, self.run.settings))
        due = is_last or position.evaluated_epoch % self.every_epochs == 0
        if not due:
            due = position.is_best(self.checkpoints.best)
        if not due and self._has_evaluated:  # otherwise it was decided just now, after the step
            due = self._decide(position.step, position)
        if due:
            self.save(position)
        if not is_last:
            self.heartbeat.at("loading", position.epoch, position.step + 1)

    def close(self, status: "Status") -> None:
        """Wait until the last checkpoint is written."""
        if status == "failed":
            self.checkpoints.wait()
            return
        self.heartbeat.at("finishing")
        self.checkpoints.wait()
        self._decide(self.saved.step, self.saved)

    def save(self, position: Progress) -> None:
        """Save a checkpoint. Collective; waits for the device.

        Args:
            position: the one in the checkpoint.
        """
        # Weights that are not finite must not be saved.
        weights = [
            local(tensor) for tensor in self.checkpoints.state.strategy.module.state_dict().values()
        ]
        leave = self._decide(position.step, position, weights)
        self.saved = position
        self._saved_at = time.perf_counter()
        self.heartbeat.at("saving")
        self.checkpoints.save(position, self.run.written)
        if leave:
            raise Preempted

    def _compare_replicas(self, step: int) -> None:
        from ddp_lab.resilience.replicas import first_difference

        state = self.checkpoints.state
        if difference := first_difference(state.strategy, state.ema.averages if state.ema else {}):
            name, replica = difference
            raise TrainingError(
                f"the replicas have drifted apart: after step {step} {name} differs between "
                f"replicas 0 and {replica} (check_replicas={self.check_replicas}). Look for code "
                "that changes it on one rank only, or for a faulty device. The last checkpoint "
                "contains the values of replica 0",
                "replicas_drifted",
            )

    def _decide(
        self, step: int, position: Progress, weights: Collection[torch.Tensor] = ()
    ) -> bool:
        """Exchange now, as `Sync.exchange`, and return whether the run is preempted.

        Collective; waits for the device.
        """
        self.heartbeat.at("deciding")
        return self._must_leave(self.sync.exchange(step, position, weights))

    def _must_leave(self, exchanged: Exchanged) -> bool:
        """Return whether the run is preempted.

        Raises:
            TrainingError: it cannot continue.
        """
        position = exchanged.position
        preempted, save_failed, *_ = exchanged.flags
        self.interrupted = exchanged.flags[INTERRUPTED]
        if exchanged.not_finite:
            bad, rank = exchanged.not_finite
            problem = (
                f"the loss of step {bad} (epoch {position.epoch}) is not finite, on rank {rank} "
                "first"
            )
            if self.on_nan == "stop":
                raise TrainingError(
                    f"{problem}. The last checkpoint is from an earlier step. Lower optimizer.lr, "
                    "set max_grad_norm, or use on_nan=skip, with which the gradient of such a "
                    "batch counts as zero",
                    "not_finite",
                    rank,
                )
            if self.run.strategy.runtime.is_main:
                log.warning(f"{problem}; its gradient counts as zero (on_nan=skip)")

        if exchanged.weights_not_finite:
            raise TrainingError(
                f"after step {position.step} some weights are not finite; they are not saved. "
                "Lower optimizer.lr or set max_grad_norm",
                "not_finite",
            )

        if save_failed and self.on_error == "stop":
            problem = self.checkpoints.problem
            if not problem:
                problem = "a checkpoint could not be written (the reason is in train.log)"
            raise TrainingError(
                f"{problem}. With checkpoint.on_error=continue training continues after such a "
                "failure",
                "checkpoint",
            )
        return preempted
