"""The metrics of training and of an evaluation: sums over samples, kept on the device and divided once.

So the host never waits for the loss of a step, and every sample counts once, whatever the sizes of batches and ranks are.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ddp_lab.data.batch import IGNORE, Batch
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.loss import sum_dtype, sums

LONGEST = 1000  # steps whose losses are kept
TOP = 5  # a sample counts in the top-5 accuracy if its class has one of the five largest logits
MOST_CLASSES = 2000  # with more classes there is no confusion matrix: with 2,000 it has 32 MB


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one evaluation, in which each sample counts once.

    Attributes:
        loss: mean loss.
        accuracy: fraction of the samples whose class has the largest logit (top-1).
        samples: number of samples.
        top5_accuracy: fraction of the samples whose class has one of the five largest logits; None with at most five classes.
        confusion: number of samples by true class (row) and predicted class (column), int64 [classes, classes] on the host;
            None with more than MOST_CLASSES classes.
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


def new_counts(classes: int, device: torch.device) -> torch.Tensor:
    """Return the counts that `count_predictions` adds to, all zero, in `sum_dtype`.

    Returns:
        [1 + classes * classes]: the number of samples whose class is among the TOP largest logits; then the confusion matrix,
        with a row per true class and a column per predicted class. [1] with more than MOST_CLASSES classes.
    """
    cells = classes * classes if classes <= MOST_CLASSES else 0
    return torch.zeros(1 + cells, dtype=sum_dtype(device), device=device)


def count_predictions(counts: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> None:
    """Add a batch to the counts of an evaluation, in place. Padding counts as 0, so the host need not know where it is.

    Args:
        counts: of `new_counts`.
        logits: [b, classes].
        targets: [b], IGNORE for padding.
    """
    classes = logits.size(1)
    real = targets != IGNORE
    true = torch.where(real, targets, 0)
    top = logits.topk(min(TOP, classes), dim=1).indices
    counts[0] += (real & (top == true.unsqueeze(1)).any(1)).sum()
    if len(counts) > 1:
        counts[1:].index_add_(0, true * classes + logits.argmax(1), real.to(counts.dtype))


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


class RunningSums:
    """The sums of this rank's steps, and the losses of its last LONGEST steps.

    Args:
        device: where the sums are kept.
        skip_not_finite: a step whose loss is not finite does not count in `totals`.

    Attributes:
        totals: [loss_sum, correct, count] in `sum_dtype` since the training loop last zeroed it.
    """

    def __init__(self, device: torch.device, skip_not_finite: bool = False):
        self.skip_not_finite = skip_not_finite
        self.totals = torch.zeros(3, dtype=sum_dtype(device), device=device)
        self._losses = torch.zeros(LONGEST, dtype=sum_dtype(device), device=device)  # index s % LONGEST: step s
        self._place = torch.zeros(1, dtype=torch.int64, device=device)  # of the last step: a CUDA graph counts steps, too
        self._add = self._add_eagerly

    @property
    def state(self) -> list[torch.Tensor]:
        """The tensors that `add` changes."""
        return [self.totals, self._losses, self._place]

    def begin(self, step: int) -> None:
        """Clear the sums and losses. The next step has the number `step` + 1."""
        self.totals.zero_()
        self._losses.zero_()
        self._place.fill_(step % LONGEST)

    def compile(self, compile_fn: partial[Any]) -> None:
        """Compile `add` with `compile_fn`."""
        self._add = compile_fn(self._add_eagerly)

    def add(self, sums: torch.Tensor) -> None:
        """Count the next step.

        Args:
            sums: the step's [loss_sum, correct, count].
        """
        self._add(sums)

    def _add_eagerly(self, sums: torch.Tensor) -> None:
        self._place.add_(1).remainder_(LONGEST)
        self._losses.index_copy_(0, self._place, sums[:1])
        self.totals += torch.where(sums[0].isfinite(), sums, 0) if self.skip_not_finite else sums

    def first_bad(self, step: int) -> torch.Tensor:
        """Return the number of the first step since the last call whose loss is not finite; inf if there is none.

        Call it at least every LONGEST steps. It does not wait for the device.

        Args:
            step: number of the last step.

        Returns:
            [], in `sum_dtype`, on the device.
        """
        places = torch.arange(LONGEST, dtype=self._losses.dtype, device=self._losses.device)
        numbers = step - (step - places) % LONGEST
        first = torch.where(self._losses.isfinite(), math.inf, numbers).min()
        self._losses.zero_()
        return first
