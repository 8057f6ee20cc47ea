"""The loss and the metrics of a batch, as sums that can be added over micro-batches, steps and ranks."""

import torch

from ddp_lab.data.sharding import IGNORE
from ddp_lab.strategies.loss import Loss


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
        targets: [b], IGNORE for padding.
    """
    correct = (logits.argmax(1) == targets).sum()
    count = (targets != IGNORE).sum()
    dtype = sum_dtype(loss.device)
    return torch.stack([loss.detach().to(dtype), correct.to(dtype), count.to(dtype)])


def add_up(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of one or more tensors of the same shape, added in their order."""
    return sum(tensors[1:], tensors[0])


def measure(loss: Loss, logits: torch.Tensor, targets: torch.Tensor, divisor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss to backpropagate, [], and the sums [loss_sum, correct, count].

    The loss to backpropagate is the sum divided by `divisor` (`Strategy.divisor`).

    Args:
        logits: [b, classes].
        targets: [b], IGNORE for padding.
    """
    loss_sum = loss(logits, targets)
    return loss_sum / divisor, sums(loss_sum, logits, targets)
