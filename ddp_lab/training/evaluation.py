"""The evaluation of a model: sums over all samples, added over the ranks once."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ddp_lab.data.batch import Batch
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.loss import TOP, count_predictions, new_counts, sum_dtype, sums


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one evaluation, in which each sample counts once.

    Attributes:
        loss: mean loss.
        accuracy: fraction of the samples whose class has the largest logit (top-1).
        samples: number of samples.
        top5_accuracy: fraction of the samples whose class has one of the five largest logits; None with at most five classes.
        confusion: number of samples by true class (row) and predicted class (column), int64 [classes, classes] on the host;
            None with more than `sums.MOST_CLASSES` classes.
    """

    loss: float
    accuracy: float
    samples: int
    top5_accuracy: float | None
    confusion: torch.Tensor | None

    def metrics(self, name: str) -> dict[str, float]:
        """Return the metrics under the names that they have in metrics.jsonl, for a set called `name`: val_loss and so on."""
        values = {f"{name}_loss": self.loss, f"{name}_accuracy": self.accuracy}
        return values if self.top5_accuracy is None else values | {f"{name}_top5_accuracy": self.top5_accuracy}


def evaluate(strategy: Strategy, batches: Iterable[Batch]) -> Evaluation:
    """Evaluate the model on all samples of one or more batches. Collective; waits for the device once, at the end."""
    strategy.train(False)
    totals = torch.zeros(3, dtype=sum_dtype(strategy.device), device=strategy.device)
    counts, classes = totals.new_zeros(0), 0
    for batch in batches:
        logits = strategy.predict(batch.inputs)
        if not classes:
            classes = logits.size(1)
            counts = new_counts(classes, strategy.device)
        totals += sums(strategy.loss(logits, batch.targets), logits, batch.targets)
        count_predictions(counts, logits, batch.targets)
    summed = total(strategy, totals, counts)
    loss, accuracy, samples = means(summed[:3].tolist())
    top5 = summed[3].item() / samples if classes > TOP else None
    confusion = summed[4:].long().view(classes, classes) if len(summed) > 4 else None
    return Evaluation(loss, accuracy, int(samples), top5, confusion)


def total(strategy: Strategy, *sums: torch.Tensor) -> torch.Tensor:
    """Return the sums over all ranks, on the host. Collective; waits for the device, so call it once per epoch.

    Args:
        sums: vectors of the same dtype. Each is added separately, because the size of a vector affects the order in which
            the ranks' values are added.

    Returns:
        The concatenated sums.
    """
    counted = [own if strategy.is_metric_rank else torch.zeros_like(own) for own in sums]
    return torch.cat([strategy.runtime.all_reduce(own) for own in counted]).cpu()


def means(sums: list[float]) -> tuple[float, float, float]:
    """Return the mean loss, the accuracy and the number of samples of [loss_sum, correct, count]."""
    loss_sum, correct, count = sums
    return loss_sum / count, correct / count, count
