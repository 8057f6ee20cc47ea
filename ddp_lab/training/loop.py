"""The training loop, the same for all strategies and ranks."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ddp_lab.config.errors import TrainingError
from ddp_lab.data.loader import Loader
from ddp_lab.observe.log import log, telling
from ddp_lab.observe.logger import Logger
from ddp_lab.strategies.base import total
from ddp_lab.tasks.base import Task
from ddp_lab.training.meter import Meter
from ddp_lab.training.metrics import Evaluation, evaluate, means
from ddp_lab.training.not_finite import NotFiniteNotes
from ddp_lab.training.plan import FitSettings
from ddp_lab.training.progress import Progress
from ddp_lab.training.step import Step, TrainStep


@dataclass(frozen=True)
class Parts:
    """What the loop works with.

    Attributes:
        eager: the step in eager mode, with the strategy, the running sums and the learning rate, however steps are executed.
            Its averages of the weights, if there are any, are evaluated in place of the weights.
        step: computes one training step.
        loaders: of the sets train, val and test; of the last two at least one.
        settings: when training ends.
        task: whose metrics are computed in an evaluation; None: those of the strategy's task.
        notes: says which metrics are not finite.
    """

    eager: Step
    step: TrainStep
    loaders: Mapping[str, Loader]
    settings: FitSettings
    task: Task | None
    notes: NotFiniteNotes


class Hooks:
    """Hooks that do nothing. `resilience.guard.Guard` overrides them to save checkpoints, compare replicas and stop the run.

    Every method is called on all ranks at the same point.
    """

    def batches(self, doing: str, loader: Iterable[Any], progress: Progress) -> Iterator[Any]:
        """Yield the batches of `loader`. `doing` is "training" or "evaluating", for messages."""
        yield from loader

    def after_step(self, progress: Progress, here: Callable[[], Progress]) -> None:
        """Run after every step.

        Args:
            progress: the position after the step, except that `sums` and `seconds` are those at the start of the epoch or, in a
                resumed epoch, at the start of this launch.
            here: returns the position with the current `sums` and `seconds`. Collective; waits for the device.
        """

    def check(self, progress: Progress) -> None:
        """Run after the last step of an epoch, before its evaluation, with `progress` after that step."""

    def evaluating(self, loader: Iterable[Any], progress: Progress, done: int = 0) -> Iterator[Any]:
        """Yield the batches of an evaluation. `done` is the number of batches of other sets that were evaluated before."""
        yield from self.batches("evaluating", loader, progress)

    def end_epoch(self, progress: Progress, last: bool) -> None:
        """Run after an evaluation, with `progress` at the beginning of the next epoch. `last`: no epoch follows."""


def fit(parts: Parts, logger: Logger, hooks: Hooks, progress: Progress) -> Progress:
    """Train from `progress` to the end, and evaluate and log after each epoch. Return the position at the end.

    The logged duration of an epoch is that of its training steps, without the evaluation.

    Args:
        parts: what is trained and evaluated.
        logger: gets a record of each epoch.
        hooks: called between steps and epochs; the exceptions that they raise end the training.
        progress: position to resume from.

    Raises:
        TrainingError: every batch of an epoch was skipped, or all its targets are ignored.
    """
    drawn = "val" if "val" in parts.loaders else "test"
    shown = next(iter(parts.loaders[drawn]))
    strategy, ema, settings, running_sums = parts.eager.strategy, parts.eager.ema, parts.settings, parts.eager.running_sums
    meter = Meter(strategy, running_sums, settings, logger)
    while not why_over(progress, settings):
        progress = train_epoch(parts, logger, hooks, progress, meter)
        hooks.check(progress)
        if progress.sums[-1] == 0:
            skipped = running_sums.skip_not_finite
            causes = "every batch was skipped (on_nan=skip): lower optimizer.lr; or " * skipped + "all targets are ignored"
            kind = "not_finite" if skipped else "exception"
            raise TrainingError(f"epoch {progress.epoch} has nothing to learn from: {causes}", kind)
        with ema.in_use() if ema else nullcontext(), telling(f"epoch {progress.epoch}: evaluating"):
            evaluated, following = evaluate_epoch(parts, hooks, progress)
            drawable = strategy.task.pictures and shown.inputs.dim() == 4
            logits = strategy.predict(shown.inputs) if drawable and drawn in evaluated else None
        for name, found in evaluated.items():
            parts.notes.check(found, name, f" after epoch {progress.epoch}")
        logger.epoch(
            progress.epoch,
            step=progress.step,
            **{f"train_{name}": value for name, value in means(strategy.task, progress.sums).items()},
            **{key: value for name, found in evaluated.items() for key, value in found.metrics(name).items()},
            lr=progress.lr,
            seconds=progress.seconds,
            samples_per_second=progress.samples / progress.seconds,
        )
        if logits is not None:
            logger.predictions(progress.epoch, shown.inputs, shown.targets, logits)
            logger.confusion(progress.epoch, evaluated[drawn].sums.get("confusion"))
        progress = following
        hooks.end_epoch(progress, last=bool(why_over(progress, settings)))
    if progress.epoch <= settings.epochs:
        log.info(f"stopped early: {' and '.join(why_over(progress, settings).values())}")
    return progress


def train_epoch(parts: Parts, logger: Logger, hooks: Hooks, before: Progress, meter: Meter) -> Progress:
    """Take the remaining steps of an epoch, from the position `before`, and return the position after the last one."""
    strategy, step, loader = parts.eager.strategy, parts.step, parts.loaders["train"]
    totals = parts.eager.running_sums.totals
    loader.set_epoch(before.order, before.samples)
    strategy.train()
    totals.zero_()
    meter.begin(before, loader.data.size)
    progress, start = replace(before), time.perf_counter()

    def here() -> Progress:
        """Return the position after the last step, with its sums. Collective; waits for the device."""
        own = total(strategy, totals).tolist()
        sums = [earlier + now for earlier, now in zip(before.sums or [0.0] * len(own), own, strict=True)]
        meter.settle()
        return replace(progress, sums=sums, recorded=meter.recorded, seconds=before.seconds + time.perf_counter() - start)

    done = -(-before.samples // loader.batch_size)
    batches = hooks.batches("training", meter.watch(step.batches(loader)), progress)
    for batch in logger.progress(batches, f"epoch {before.epoch}/{parts.settings.epochs}", done, len(loader)):
        step(batch)
        progress.samples, progress.step, progress.lr = progress.samples + batch.count, progress.step + 1, parts.eager.lr
        meter.after_step(progress)
        hooks.after_step(progress, here)
    return here()


def evaluate_epoch(parts: Parts, hooks: Hooks, progress: Progress) -> tuple[dict[str, Evaluation], Progress]:
    """Evaluate the sets that are due after an epoch. Collective.

    The validation set comes first, because it decides whether the epoch is the last one.

    Returns:
        The metrics by set, and the position at the beginning of the next epoch.
    """
    evaluated: dict[str, Evaluation] = {}
    strategy, loaders, settings = parts.eager.strategy, parts.loaders, parts.settings
    if "val" in loaders:
        evaluated["val"] = evaluate(strategy, hooks.evaluating(loaders["val"], progress), parts.task)
    task = parts.task or strategy.task
    following = progress.next_epoch(evaluated["val"].metrics("val") if evaluated else {}, task.lower_is_better)
    if "test" in loaders and (settings.evaluate_test == "every_epoch" or why_over(following, settings)):
        done = len(loaders["val"]) if evaluated else 0
        evaluated["test"] = evaluate(strategy, hooks.evaluating(loaders["test"], progress, done), parts.task)
    return evaluated, following


def why_over(progress: Progress, settings: FitSettings) -> dict[str, str]:
    """Return why a run is over, by what has to be raised to continue it; empty if another epoch follows."""
    reasons, name = dict[str, str](), settings.criterion
    stalled = progress.stalled(name)
    if progress.epoch > settings.epochs:
        reasons["epochs"] = f"{progress.epoch - 1} of epochs={settings.epochs} are done"
    if settings.patience is not None and stalled >= settings.patience:
        no_better = f"the last {stalled} epochs had no better {name} than epoch {progress.best_epochs.get(name, 0)}"
        if name not in progress.best_epochs:
            no_better = f"none of the {stalled} epochs has a finite {name} that is kept as the best"
        reasons[f"patience above {stalled}"] = f"{no_better} (patience={settings.patience})"
    return reasons
