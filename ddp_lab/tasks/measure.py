"""What a strategy computes of the outputs of a micro-batch: the loss to backpropagate, and sums."""

import torch

from ddp_lab.tasks.base import Task


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums over samples: float64, or float32 on mps, which has no float64.

    In float32 a count is exact up to 2**24 samples, and a loss sum keeps about six digits.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def in_float32(outputs: torch.Tensor) -> torch.Tensor:
    """Return outputs in bf16 as float32, because bf16's 8 bits are too coarse for a sum."""
    return outputs.float() if outputs.dtype == torch.bfloat16 else outputs


def width(task: Task) -> int:
    """Return the number of sums of a training step: those of `measure`."""
    return 2 + len(task.running)


def measure(
    task: Task, outputs: torch.Tensor, targets: torch.Tensor, real: int, divisor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss to backpropagate, [], and the sums [loss_sum, *task.running, weight] in `sum_dtype`.

    The loss to backpropagate is the sum divided by `divisor`.

    Args:
        outputs, targets: of a micro-batch, [b, ...], with padding at the end.
        real: number of samples without padding.
        divisor: size of the GLOBAL batch; where gradients are averaged over replicas, divided by their number.
    """
    outputs, targets = in_float32(outputs[:real]), targets[:real]
    loss_sum, weight = task.loss_sum(outputs, targets)
    dtype = sum_dtype(outputs.device)
    sums = [loss_sum.detach(), *task.running_sums(outputs, targets), weight]
    return loss_sum / divisor, torch.stack([each.to(dtype) for each in sums])
