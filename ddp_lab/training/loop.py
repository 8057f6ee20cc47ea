"""The training loop, the same for all strategies and ranks."""

import math
import statistics
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import replace

from ddp_lab.config.errors import TrainingError
from ddp_lab.data.loader import Loader
from ddp_lab.observe.log import log
from ddp_lab.observe.logger import Logger
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.ema import EMA
from ddp_lab.training.evaluation import evaluate, means
from ddp_lab.training.hooks import Hooks
from ddp_lab.training.progress import Progress
from ddp_lab.training.step import TrainStep

LONGEST = 1000  # epochs of whose durations the median is logged


def fit(
    strategy: Strategy,
    step: TrainStep,
    train_loader: Loader,
    test_loader: Loader,
    logger: Logger,
    hooks: Hooks,
    progress: Progress,
    epochs: int,
    patience: int | None = None,
    ema: EMA | None = None,
) -> Progress:
    """Train from `progress` to the end, and evaluate and log after each epoch.

    The logged duration of an epoch is that of its training steps, without the evaluation.

    Args:
        strategy: after `Strategy.setup`.
        step: computes one training step.
        logger: gets a record of each epoch.
        hooks: called between steps and epochs; the exceptions that they raise end the training.
        progress: position to resume from.
        epochs: number of the last epoch.
        ema: averages of the weights, which are evaluated in place of the weights; None: no averages.
        patience: stop early after this many epochs in a row without a lower test loss; None: never.

    Returns:
        The position at the end.

    Raises:
        TrainingError: every batch of an epoch was skipped.
    """
    durations: deque[float] = deque(maxlen=LONGEST)
    test_accuracy = samples = math.nan
    shown = next(iter(test_loader))
    while not is_over(progress, epochs, patience):
        progress = train_epoch(strategy, step, train_loader, logger, hooks, progress, epochs)
        hooks.check(progress)
        durations.append(progress.seconds)
        if progress.sums[2] == 0:
            message = f"every batch of epoch {progress.epoch} was skipped (on_nan=skip): lower optimizer.lr"
            raise TrainingError(message, "not_finite")
        train_loss, train_accuracy, samples = means(progress.sums)
        with ema.in_use() if ema else nullcontext():
            tested = evaluate(strategy, hooks.evaluating(test_loader, progress))
            logits = strategy.predict(shown.inputs)
        test_accuracy = tested.accuracy
        logger.epoch(
            progress.epoch,
            train_loss=train_loss,
            train_accuracy=train_accuracy,
            test_loss=tested.loss,
            test_accuracy=test_accuracy,
            **({} if tested.top5_accuracy is None else {"test_top5_accuracy": tested.top5_accuracy}),
            lr=progress.lr,
            seconds=progress.seconds,
            samples_per_second=samples / progress.seconds,
        )
        logger.predictions(progress.epoch, shown.inputs, shown.targets, logits)
        logger.confusion(progress.epoch, tested.confusion)
        progress = next_epoch(progress, tested.loss, tested.accuracy)
        hooks.end_epoch(progress, last=is_over(progress, epochs, patience))
    if durations:
        logger.summary(test_accuracy, statistics.median(durations), samples / statistics.median(durations))
    if progress.epoch <= epochs:
        log.info(
            f"stopped early: no test loss below that of epoch {progress.best_epoch} in the last {patience} epochs (patience)"
        )
    return progress


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
        own = strategy.total(step.tally.totals.clone()).tolist()
        sums = [earlier + now for earlier, now in zip(before.sums, own, strict=True)]
        return replace(progress, sums=sums, seconds=before.seconds + time.perf_counter() - start)

    done = -(-before.samples // loader.batch_size)
    batches = hooks.batches("training", step.batches(loader), progress)
    for batch in logger.progress(batches, f"epoch {before.epoch}/{epochs}", done, len(loader)):
        step(batch)
        progress.samples, progress.step, progress.lr = progress.samples + batch.count, progress.step + 1, step.lr
        hooks.after_step(progress, here)
    return here()


def next_epoch(progress: Progress, test_loss: float, test_accuracy: float) -> Progress:
    """Return the position at the beginning of the next epoch. The metrics are those of the epoch that ended."""
    following = replace(progress, epoch=progress.epoch + 1, samples=0, sums=[0.0, 0.0, 0.0], seconds=0.0, lr=0.0)
    if math.isfinite(test_loss):
        if progress.best_loss is None or test_loss < progress.best_loss:
            following.best_loss, following.best_epoch = test_loss, progress.epoch
        if progress.best_accuracy is None or test_accuracy > progress.best_accuracy:
            following.best_accuracy, following.best_accuracy_epoch = test_accuracy, progress.epoch
    return following


def is_over(progress: Progress, epochs: int, patience: int | None) -> bool:
    """Return whether all epochs are done, or the last `patience` epochs did not lower the test loss."""
    done = progress.epoch - 1
    return done >= epochs or (patience is not None and done - progress.best_epoch >= patience)


def why_over(progress: Progress, epochs: int, patience: int | None) -> str:
    """Return why a run `is_over`, and what continues it."""
    done, stalled = progress.epoch - 1, progress.epoch - 1 - progress.best_epoch
    reasons, raised = list[str](), list[str]()
    if done >= epochs:
        reasons.append(f"{done} of epochs={epochs} are done")
        raised.append("epochs")
    if patience is not None and stalled >= patience:
        reasons.append(
            f"the last {stalled} epochs had no test loss below that of epoch {progress.best_epoch} (patience={patience})"
        )
        raised.append(f"patience above {stalled}")
    return f"{' and '.join(reasons)}; raise {' and '.join(raised)} to continue, or use another name"
