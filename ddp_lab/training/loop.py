"""The training loop, the same for all strategies and ranks."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

from ddp_lab.config.errors import TrainingError
from ddp_lab.data.loader import Loader
from ddp_lab.observe.log import log
from ddp_lab.observe.logger import Logger
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.ema import EMA
from ddp_lab.training.evaluation import Evaluation, evaluate, means, total
from ddp_lab.training.hooks import Hooks
from ddp_lab.training.progress import Progress
from ddp_lab.training.step import TrainStep


@dataclass(frozen=True)
class FitSettings:
    """When training ends, and when the test set is evaluated.

    Attributes:
        epochs: number of the last epoch.
        patience: stop early after this many epochs in a row without a lower val_loss; None: never.
        evaluate_test: after every epoch, or after the last one only.
    """

    epochs: int
    patience: int | None = None
    evaluate_test: Literal["every_epoch", "end"] = "every_epoch"


def fit(
    strategy: Strategy,
    step: TrainStep,
    loaders: Mapping[str, Loader],
    logger: Logger,
    hooks: Hooks,
    progress: Progress,
    settings: FitSettings,
    ema: EMA | None = None,
) -> Progress:
    """Train from `progress` to the end, and evaluate and log after each epoch.

    The logged duration of an epoch is that of its training steps, without the evaluation.

    Args:
        strategy: after `Strategy.setup`.
        step: computes one training step.
        loaders: of the sets train, val and test; of the last two at least one.
        logger: gets a record of each epoch.
        hooks: called between steps and epochs; the exceptions that they raise end the training.
        progress: position to resume from.
        settings: when training ends.
        ema: averages of the weights, which are evaluated in place of the weights; None: no averages.

    Returns:
        The position at the end.

    Raises:
        TrainingError: every batch of an epoch was skipped.
    """
    drawn = "val" if "val" in loaders else "test"
    shown = next(iter(loaders[drawn]))
    while not is_over(progress, settings):
        progress = train_epoch(strategy, step, loaders["train"], logger, hooks, progress, settings.epochs)
        hooks.check(progress)
        if progress.sums[2] == 0:
            message = f"every batch of epoch {progress.epoch} was skipped (on_nan=skip): lower optimizer.lr"
            raise TrainingError(message, "not_finite")
        with ema.in_use() if ema else nullcontext():
            evaluated, following = evaluate_epoch(strategy, loaders, hooks, progress, settings)
            logits = strategy.predict(shown.inputs) if drawn in evaluated else None
        train_loss, train_accuracy, samples = means(progress.sums)
        logger.epoch(
            progress.epoch,
            step=progress.step,
            train_loss=train_loss,
            train_accuracy=train_accuracy,
            **{key: value for name, found in evaluated.items() for key, value in found.metrics(name).items()},
            lr=progress.lr,
            seconds=progress.seconds,
            samples_per_second=samples / progress.seconds,
        )
        if logits is not None:
            logger.predictions(progress.epoch, shown.inputs, shown.targets, logits)
            logger.confusion(progress.epoch, evaluated[drawn].confusion)
        progress = following
        hooks.end_epoch(progress, last=is_over(progress, settings))
    if progress.epoch <= settings.epochs:
        log.info(f"stopped early: {no_lower_loss(progress)} (patience={settings.patience})")
    return progress


def evaluate_epoch(
    strategy: Strategy, loaders: Mapping[str, Loader], hooks: Hooks, progress: Progress, settings: FitSettings
) -> tuple[dict[str, Evaluation], Progress]:
    """Evaluate the sets that are due after an epoch. Collective.

    The validation set comes first, because it decides whether the epoch is the last one.

    Returns:
        The metrics by set, and the position at the beginning of the next epoch.
    """
    evaluated: dict[str, Evaluation] = {}
    if "val" in loaders:
        evaluated["val"] = evaluate(strategy, hooks.evaluating(loaders["val"], progress))
    following = progress.next_epoch(evaluated["val"].metrics("val") if evaluated else {})
    if "test" in loaders and (settings.evaluate_test == "every_epoch" or is_over(following, settings)):
        done = len(loaders["val"]) if evaluated else 0
        evaluated["test"] = evaluate(strategy, hooks.evaluating(loaders["test"], progress, done))
    return evaluated, following


def train_epoch(
    strategy: Strategy, step: TrainStep, loader: Loader, logger: Logger, hooks: Hooks, before: Progress, epochs: int
) -> Progress:
    """Run the remaining steps of an epoch.

    Args:
        before: position to resume from.
        epochs: number of the last epoch, for the progress bar.

    Returns:
        The position after the epoch's last step.
    """
    loader.set_epoch(before.epoch, before.samples)
    strategy.train()
    step.tally.totals.zero_()
    progress, start = replace(before), time.perf_counter()

    def here() -> Progress:
        """Return the position after the last step, with its sums. Collective; waits for the device."""
        own = total(strategy, step.tally.totals.clone()).tolist()
        sums = [earlier + now for earlier, now in zip(before.sums, own, strict=True)]
        return replace(progress, sums=sums, seconds=before.seconds + time.perf_counter() - start)

    done = -(-before.samples // loader.batch_size)
    batches = hooks.batches("training", step.batches(loader), progress)
    for batch in logger.progress(batches, f"epoch {before.epoch}/{epochs}", done, len(loader)):
        step(batch)
        progress.samples, progress.step, progress.lr = progress.samples + batch.count, progress.step + 1, step.lr
        hooks.after_step(progress, here)
    return here()


def is_over(progress: Progress, settings: FitSettings) -> bool:
    """Return whether all epochs are done, or the last `patience` epochs did not lower the val_loss."""
    return progress.epoch > settings.epochs or (settings.patience is not None and progress.stalled >= settings.patience)


def why_over(progress: Progress, settings: FitSettings) -> str:
    """Return why a run `is_over`, and what continues it."""
    reasons, raised = list[str](), list[str]()
    if progress.epoch > settings.epochs:
        reasons.append(f"{progress.epoch - 1} of epochs={settings.epochs} are done")
        raised.append("epochs")
    if settings.patience is not None and progress.stalled >= settings.patience:
        reasons.append(f"{no_lower_loss(progress)} (patience={settings.patience})")
        raised.append(f"patience above {progress.stalled}")
    return f"{' and '.join(reasons)}; raise {' and '.join(raised)} to continue, or use another name"


def no_lower_loss(progress: Progress) -> str:
    """Return how many epochs did not lower the val_loss, for a message."""
    return f"the last {progress.stalled} epochs had no val_loss below that of epoch {progress.best_epochs.get('val_loss', 0)}"
