"""The training loop: one for all strategies. It knows no rank and no strategy's name."""

import statistics
import time
from collections.abc import Callable

import torch

from ddp_lab.data.loaders import Loader
from ddp_lab.logger import Logger
from ddp_lab.step import Step
from ddp_lab.strategies.base import Strategy


def fit(
    strategy: Strategy,
    step: Step,
    train_loader: Loader,
    test_loader: Loader,
    logger: Logger,
    epochs: range,
    save: Callable[[int], None],
) -> None:
    """Trains for `epochs`, numbered from 1; evaluates, logs and saves after each.

    The seconds of an epoch are those of its training steps alone.
    """
    durations = []
    shown = next(iter(test_loader))
    for epoch in epochs:
        train_loader.set_epoch(epoch)
        strategy.train()
        totals = torch.zeros(3, dtype=torch.float64, device=strategy.device)
        start = time.perf_counter()
        for batch in logger.progress(train_loader, f"epoch {epoch}/{epochs.stop - 1}"):
            totals += step(batch)
        train_loss, train_accuracy, samples = means(strategy.total(totals))  # waits for the device
        durations.append(time.perf_counter() - start)
        test_loss, test_accuracy, _ = evaluate(strategy, test_loader)
        logger.epoch(
            epoch,
            train_loss=train_loss,
            train_accuracy=train_accuracy,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            lr=step.lr,
            seconds=durations[-1],
            samples_per_second=samples / durations[-1],
        )
        logger.predictions(epoch, shown.inputs, shown.targets, strategy.predict(shown.inputs))
        save(epoch)
    if durations:
        logger.summary(test_accuracy, statistics.median(durations), samples / statistics.median(durations))


def evaluate(strategy: Strategy, loader: Loader) -> tuple[float, float, float]:
    """Mean loss, accuracy and number of samples over the whole of `loader`, each sample counted once."""
    strategy.train(False)
    totals = torch.zeros(3, dtype=torch.float64, device=strategy.device)
    for batch in loader:
        totals += strategy.evaluate(batch.inputs, batch.targets)
    return means(strategy.total(totals))


def means(sums: list[float]) -> tuple[float, float, float]:
    loss_sum, correct, count = sums
    return loss_sum / count, correct / count, count
