"""Hooks: what the loop calls besides the steps of a training, and the training as they see it."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_lab.data.loader import Loader
from ddp_lab.observe.logger import Logger
from ddp_lab.strategies.base import Strategy, total
from ddp_lab.tasks.base import Task
from ddp_lab.training.metrics import Evaluation
from ddp_lab.training.plan import FitSettings
from ddp_lab.training.progress import Progress
from ddp_lab.training.step import Step, TrainStep
from ddp_lab.training.sync import Sync

if TYPE_CHECKING:
    from ddp_lab.observe.trackers.base import Status
    from ddp_lab.training.energy import EnergyMeter
    from ddp_lab.training.gathered_metrics import GatheredMetrics
    from ddp_lab.training.not_finite import NotFiniteNotes


class Hook:
    """A part of a training besides its steps.

    Each method does nothing here; a subclass overrides some of them. A user passes subclasses by
    the key `callbacks` or to `Lab.trainer`.

    The loop calls the hooks in the order of their list, on all ranks at the same point. An
    exception that a hook raises ends the training. A position has `epoch`, `step`, `samples` of the
    epoch so far, `lr` and others.
    """

    def on_start(self, run: Any) -> None:
        """Run before the first step, with `run.position` where the training begins or resumes.

        Args:
            run: for a callback what it may know of the run: `rank`, `world_size`, `is_main`,
                `device`, `folder`, `epochs`, `position`, and the methods `samples(number)` and
                `predict(inputs)`. A hook of ddp_lab gets the Run.
        """

    def before_step(self, batch: Any) -> Any:
        """Return the batch to train on in place of `batch`, most often the same one.

        A captured step gathers its batch by itself, as a part of its CUDA graph: it hands hooks the
        number of samples in place of a batch. `run.step.gather` of a Run returns the batch of
        either.

        Args:
            batch: this rank's part of the GLOBAL batch, with `inputs` and `targets`, [b, ...], and
                the number of samples over all ranks, `global_size`. Rows that are padding are at
                the end.
        """
        return batch

    def on_step_end(self, position: Progress) -> None:
        """Run after every step.

        Args:
            position: after the step, except that `sums` and `seconds` are those at the start of the
                epoch or, in a resumed epoch, at the start of this launch. `run.current` returns it
                with the present ones.
        """

    def on_evaluation_batch(self, position: Progress, number: int) -> None:
        """Run after each batch of an evaluation.

        Args:
            position: after the last step of the epoch.
            number: of the batch, from 1, among those of all sets that are evaluated after this
                epoch.
        """

    def on_evaluate(self, results: Mapping[str, Evaluation]) -> None:
        """Run after the evaluation of an epoch, while the model still has the evaluated weights.

        Args:
            results: of each set that was evaluated, by its name, val or test: `values`, the metrics
                by name, such as loss, and the number of `samples`. `run.position` of a Run is after
                the last step.
        """

    def on_evaluated(
        self, position: Progress, results: Mapping[str, Evaluation], seconds: float
    ) -> None:
        """Run after an evaluation within an epoch, when training goes on.

        Args:
            position: as in `on_step_end`, of the last step.
            results: of the set that was evaluated, by its name, val or test.
            seconds: duration of the evaluation.
        """

    def on_checkpoint(self, path: Path) -> None:
        """Run when a checkpoint is complete on the disk, on rank 0 in the thread that wrote it.

        Args:
            path: of its file or directory.
        """

    def on_epoch_end(self, position: Progress) -> None:
        """Run after the evaluation of an epoch, with `position` at the beginning of the next.

        Where a limit ends the run within an epoch, `position` remains there.
        """

    def close(self, status: "Status") -> None:
        """Run after the training.

        It does not run after an error of which this rank knows no more than its traceback.

        Args:
            status: how the training ended: finished, preempted, interrupted or failed.
        """


def lower_is_better(
    metric: str, task: Task | type[Task], metrics: "GatheredMetrics | None"
) -> bool:
    """Return whether lower values of a metric are better.

    Args:
        metric: name, such as loss, without that of a set.
        task: or its class, which has it, unless `metrics` have.
        metrics: further ones; None: there are none.
    """
    if metrics is not None and metric in metrics.higher_is_better:
        return metrics.higher_is_better[metric] is False
    return task.lower_is_better(metric)


@dataclass(eq=False)
class Run:
    """A training as its hooks see it.

    Attributes:
        eager: the step in eager mode, with the strategy, the running sums and the learning rate,
            however steps are executed. Its averages of the weights, if there are any, are evaluated
            in place of the weights.
        step: computes one training step.
        loaders: of the sets train, val and test; of the last two at least one.
        settings: when training ends.
        logger: gets a record of each epoch.
        hooks: called between steps and epochs.
        sync: what the ranks exchange between steps.
        position: where the training is.
        task: whose metrics are computed in an evaluation; None: those of the strategy's task.
        notes: what was said before about metrics that are not finite; None: nothing.
        waited: seconds in which this rank has waited for the batches of this epoch in this launch.
        metrics: further metrics of an evaluation, which are no sums; None: there are none.
        energy: of the GPUs; None: it cannot be read.
        ends_after: number of the step after which the run ends, also within an epoch; inf: none.
    """

    eager: Step
    step: TrainStep
    loaders: Mapping[str, Loader]
    settings: FitSettings
    logger: Logger
    hooks: Sequence[Hook]
    sync: Sync
    position: Progress
    task: Task | None = None
    notes: "NotFiniteNotes | None" = None
    waited: float = 0.0
    metrics: "GatheredMetrics | None" = None
    energy: "EnergyMeter | None" = None
    ends_after: float = field(init=False)
    _begun: Progress = field(init=False, repr=False)
    _begun_at: float = field(init=False, repr=False)
    _joules_of_steps: float = field(init=False, repr=False, default=0.0)

    def __post_init__(self) -> None:
        last_step = self.settings.last_step
        self.ends_after = math.inf if last_step is None else last_step

    @property
    def strategy(self) -> Strategy:
        """The strategy, which has the model."""
        return self.eager.strategy

    def lower_is_better(self, metric: str) -> bool:
        """Return whether lower values of a metric, such as loss, are better."""
        return lower_is_better(metric, self.task or self.strategy.task, self.metrics)

    def begin_epoch(self) -> None:
        """Begin with the remaining steps of an epoch, at `position`."""
        self.eager.running_sums.totals.zero_()
        self._begun = self.position
        self.position = replace(self.position, stream=self._stream())
        self.waited = 0.0
        self.sync.begin_epoch(self._begun)
        if self.energy is not None:
            self.energy.begin_epoch()
        self._begun_at = time.perf_counter()

    def end_in_time(self) -> None:
        """End after the last step, because max_minutes have passed. All ranks call it."""
        self.position.minutes_passed = self.settings.max_minutes or 0.0
        self.ends_after = self.position.step

    def leave_out(self, seconds: float, joules: float) -> None:
        """Leave seconds and joules in which no step was taken out of those of the epoch's steps."""
        self._begun_at += seconds
        if self.energy is not None:
            self.energy.leave_out(joules)

    def joules_here(self) -> float:
        """Return the joules of the GPUs that this rank reads, in this launch; 0 if it cannot."""
        return self.energy.read_here() if self.energy is not None else 0.0

    def note_energy(self, *positions: Progress) -> None:
        """Set the energy of the run so far in positions. Collective if it can be read."""
        if self.energy is None:
            return
        joules = self.energy.before + self.energy.read().launch
        for position in positions:
            position.joules = joules

    def energy_fields(self) -> dict[str, float]:
        """Return what a row of metrics.jsonl has of energy; {} if it cannot be read."""
        if self.energy is None:
            return {}
        from ddp_lab.training.energy import JOULES_PER_KWH

        values = {"energy_kWh": self.position.joules / JOULES_PER_KWH}
        samples = self.position.samples - self._begun.samples
        if samples > 0:  # a launch may resume after the last step of an epoch
            values["joules_per_sample"] = self._joules_of_steps / samples
        return values

    def current(self) -> Progress:
        """Return the position after the last step, with its sums and seconds.

        Collective; waits for the device.
        """
        begun = self._begun
        own_sums = total(self.strategy, self.eager.running_sums.totals).tolist()
        earlier = begun.sums or [0.0] * len(own_sums)
        sums = [before + now for before, now in zip(earlier, own_sums, strict=True)]
        self.sync.flush()
        seconds = begun.seconds + time.perf_counter() - self._begun_at
        position = replace(self.position, sums=sums, recorded=self.sync.recorded, seconds=seconds)
        position.stream = self._stream()
        if self.energy is not None:
            energy = self.energy.read()
            position.joules = self.energy.before + energy.launch
            self._joules_of_steps = energy.steps
        return position

    def _stream(self) -> dict[str, Any]:
        """Return where the readers of a stream are; {} without one. Collective with one."""
        return self.loaders["train"].stream_position(self.strategy.runtime)

    def has_trained_long_enough(self) -> bool:
        """Return whether the steps so far took max_minutes, by the clock of rank 0.

        False on other ranks, and between epochs.
        """
        limit = self.settings.max_minutes
        if limit is None or not self.strategy.runtime.is_main:
            return False
        begun = self._begun
        return begun.seconds_trained + time.perf_counter() - self._begun_at >= 60 * limit

    def note_not_finite(self, evaluations: Mapping[str, Evaluation]) -> None:
        """Log which metrics of some sets are not finite, each once."""
        if self.notes is None:
            from ddp_lab.training.not_finite import NotFiniteNotes

            self.notes = NotFiniteNotes(self.strategy.runtime.is_main)
        self.notes.check(evaluations, f" after epoch {self.position.epoch}")

    def written(self, path: Path) -> None:
        """Let the hooks know of a complete checkpoint."""
        for hook in self.hooks:
            hook.on_checkpoint(path)


class Exchanges(Hook):
    """Lets the ranks exchange what is due after a step, where exchanges decide nothing."""

    def on_start(self, run: Run) -> None:
        self.run = run

    def on_step_end(self, position: Progress) -> None:
        if position.step >= self.run.sync.next:
            self.run.sync.after_step(position, self.run.waited)


def overrides(hooks: Sequence[Hook], method: str) -> list[Callable[..., Any]]:
    """Return a method of the hooks that override it, without calls that do nothing."""
    return [
        getattr(hook, method)
        for hook in hooks
        if getattr(type(hook), method) is not getattr(Hook, method)
    ]


def close_all(hooks: Sequence[Hook], status: "Status") -> None:
    """Close hooks, in the order of their list."""
    for hook in hooks:
        hook.close(status)
