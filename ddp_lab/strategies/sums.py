"""The loss and the metrics of a batch, as sums that can be added over micro-batches, steps and ranks."""

import torch

from ddp_lab.data.batch import IGNORE, classes_of
from ddp_lab.strategies.loss import Loss

TOP = 5  # a sample counts in the top-5 accuracy if its class has one of the five largest logits
MOST_CLASSES = 2000  # with more classes there is no confusion matrix: with 2,000 it has 32 MB


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums over samples: float64, or float32 on mps, which has no float64.

    In float32 a count is exact up to 2**24 samples, and a loss sum keeps about six digits.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def sums(loss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return [loss_sum, correct, count] in `sum_dtype`, on the device.

    Sums can be added over steps and ranks. They are divided once, on the host.

    Args:
        loss: `Loss` of the logits and targets, [].
        logits: [b, classes].
        targets: [b], IGNORE for padding; or mixed ones, [b, classes], of which the most probable class is the correct one.
    """
    expected = classes_of(targets)
    dtype = sum_dtype(loss.device)
    correct = (logits.argmax(1) == expected).sum(dtype=dtype)
    count = (expected != IGNORE).sum(dtype=dtype)
    return torch.stack([loss.detach().to(dtype), correct, count])


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


def add_up(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of one or more tensors of the same shape, added in their order."""
    return sum(tensors[1:], tensors[0])


def measure(loss: Loss, logits: torch.Tensor, targets: torch.Tensor, divisor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss to backpropagate, [], and the sums [loss_sum, correct, count].

    The loss to backpropagate is the sum divided by `divisor` (`Strategy.divisor`).

    Args:
        logits: [b, classes].
        targets: [b], IGNORE for padding; or mixed ones, [b, classes].
    """
    loss_sum = loss(logits, targets)
    return loss_sum / divisor, sums(loss_sum, logits, targets)
