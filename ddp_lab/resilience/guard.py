"""What stands between training and losing it: when to save, when to stop, and how to leave."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ddp_lab.config.errors import TrainingError
from ddp_lab.observe.logger import log
from ddp_lab.resilience.checkpoint import Checkpoints
from ddp_lab.resilience.decisions import Decisions, Verdict
from ddp_lab.resilience.replicas import first_difference
from ddp_lab.resilience.watchdog import Watchdog
from ddp_lab.strategies.base import Strategy, local
from ddp_lab.training.hooks import Hooks
from ddp_lab.training.progress import Progress
from ddp_lab.training.tally import Tally


class Preempted(Exception):
    """The machine is wanted back; a checkpoint of this very step is being written."""


@dataclass(frozen=True)
class GuardSettings:
    """The user's choices for a Guard.

    Attributes:
        every_epochs, every_steps: when to save; the last epoch is saved in any case. every_steps None: after epochs only.
        on_error: what follows a checkpoint that cannot be written.
        on_nan: what follows a loss that is not finite.
        check_replicas: the replicas are compared every so many steps; None: never.
    """

    every_epochs: int
    every_steps: int | None
    on_error: Literal["stop", "continue"]
    on_nan: Literal["stop", "skip"]
    check_replicas: int | None


class Guard(Hooks):
    """What the loop calls at its boundaries.

    Args:
        progress: where the run stands at the start.
        tally: where the losses of the steps are.

    Attributes:
        progress: where the run was saved last, or stood at the start.
    """

    def __init__(
        self,
        settings: GuardSettings,
        strategy: Strategy,
        checkpoints: Checkpoints,
        decisions: Decisions,
        watch: Watchdog,
        progress: Progress,
        tally: Tally,
    ):
        self.settings, self.strategy = settings, strategy
        self.checkpoints, self.decisions, self.watch = checkpoints, decisions, watch
        self.progress = progress
        decisions.begin(progress.step, tally)

    def batches(self, doing: str, loader: Iterable[Any], progress: Progress) -> Iterator[Any]:
        """The loader's, each shown to the watch."""
        self.watch.at("loading", progress.epoch, progress.step + 1)
        for batch in loader:
            self.watch.at(doing, progress.epoch, progress.step + 1)
            yield batch
            self.watch.at("loading", progress.epoch, progress.step + 1)

    def after_step(self, progress: Progress, here: Callable[[], Progress]) -> None:
        """Behind every step. `here` completes `progress` by the sums so far, and is collective.

        Raises:
            Preempted, TrainingError: on all ranks alike.
        """
        self._boundary(progress.step, progress, here)
        check_replicas, every_steps = self.settings.check_replicas, self.settings.every_steps
        if check_replicas and progress.step % check_replicas == 0:
            self._compare_replicas(progress.step)
        if every_steps and progress.step % every_steps == 0:
            self.save(here())

    def evaluating(self, loader: Iterable[Any], progress: Progress) -> Iterator[Any]:
        """The loader's batches, with a boundary between any two: a preemption does not wait for a long evaluation, which is
        then done anew.

        Raises:
            Preempted, TrainingError: on all ranks alike.
        """
        for number, batch in enumerate(self.batches("evaluating", loader, progress), progress.step + 1):
            yield batch
            self._boundary(number, progress, lambda: progress)

    def check(self, progress: Progress) -> None:
        """Settles all that is open about the steps so far, `progress` being complete. Waits for the device.

        Raises:
            Preempted, TrainingError: on all ranks alike.
        """
        if self._must_leave_now(progress):
            self._save_and_leave(progress)

    def end_epoch(self, progress: Progress, last: bool) -> None:
        """Behind an evaluation; `progress` stands at the next epoch's beginning."""
        if last or (progress.epoch - 1) % self.settings.every_epochs == 0:
            self.save(progress)
        else:
            self.check(progress)

    def finish(self) -> None:
        """Waits for the last checkpoint.

        Raises:
            TrainingError: it could not be written, on all ranks alike.
        """
        self.watch.at("finishing")
        self.checkpoints.wait()
        self._must_leave_now(self.progress)

    def save(self, progress: Progress) -> None:
        self.progress = progress
        leave = self._must_leave_now(progress, weights=True)  # before: what is not finite must not get into a file
        self.watch.at("saving")
        self.checkpoints.save(progress)
        if leave:
            raise Preempted

    def _boundary(self, number: int, progress: Progress, here: Callable[[], Progress]) -> None:
        if self.decisions.due(number):
            self.watch.at("deciding")
            verdict = self.decisions.after(number, self.checkpoints.problem is not None)
            if verdict and self._must_leave(verdict, progress):
                self._save_and_leave(here())

    def _compare_replicas(self, step: int) -> None:
        if difference := first_difference(self.strategy):
            name, replica = difference
            raise TrainingError(
                f"the replicas have drifted apart: behind step {step} {name} is not the same on replicas 0 and {replica} "
                f"(check_replicas={self.settings.check_replicas}). Some rank computes or changes it by itself; the last "
                "checkpoint has replica 0's",
                "replicas_drifted",
            )

    def _save_and_leave(self, progress: Progress) -> None:
        self.save(progress)
        raise Preempted

    def _must_leave_now(self, progress: Progress, weights: bool = False) -> bool:
        """Settles what is open about the steps so far. Waits for the device."""
        self.watch.at("deciding")
        held = [local(tensor) for tensor in self.strategy.module.state_dict().values()] if weights else []
        return self._must_leave(self.decisions.now(progress.step, self.checkpoints.problem is not None, held), progress)

    def _must_leave(self, verdict: Verdict, progress: Progress) -> bool:
        if verdict.not_finite:
            step, rank = verdict.not_finite
            what = f"the loss of step {step} (epoch {progress.epoch}) is not finite, on rank {rank} first"
            if self.settings.on_nan == "stop":
                raise TrainingError(
                    f"{what}. The last checkpoint is from before it. Lower optimizer.lr, set max_grad_norm, or leave out such "
                    "batches by on_nan=skip",
                    "not_finite",
                    rank,
                )
            if self.watch.rank == 0:
                log.warning(f"{what}; its gradient was left out (on_nan=skip)")
        if verdict.ruined:
            raise TrainingError(
                f"after step {progress.step} some weights are not finite; they are not saved. Lower "
                "optimizer.lr, or set max_grad_norm",
                "not_finite",
            )
        if verdict.unwritten and self.settings.on_error == "stop":
            raise TrainingError(
                f"a checkpoint could not be written: {self.checkpoints.problem or 'rank 0 has the reason in train.log'}. "
                "checkpoint.on_error=continue goes on without",
                "checkpoint",
            )
        return verdict.preempted
