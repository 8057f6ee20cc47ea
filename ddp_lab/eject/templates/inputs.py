"""What the model takes, and what is measured of its logits."""

import torch
import torch.nn.functional as F
from settings import INPUTS, LABEL_SMOOTHING, MEAN, STD, TASK
from torch import Tensor


def model_inputs(samples: Tensor) -> Tensor:
    """Return samples as the model takes them."""
    if INPUTS == "images":
        mean = torch.tensor(MEAN, device=samples.device).view(-1, 1, 1)
        std = torch.tensor(STD, device=samples.device).view(-1, 1, 1)
        return samples * (1 / (255 * std)) - mean / std
    elif INPUTS == "tokens":
        return samples.long()
    else:
        return samples


def measure(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses; and it with the numbers of right and of all targets, [3]."""
    if TASK == "tokens":
        logits = logits.flatten(0, 1)
        targets = targets.flatten().long()
        losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
        loss = losses.sum()
        count = (targets != -100).sum()
    elif LABEL_SMOOTHING > 0:
        smoothing = LABEL_SMOOTHING if torch.is_grad_enabled() else 0.0
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
        count = torch.tensor(len(targets), device=targets.device)
    else:
        loss = F.cross_entropy(logits, targets, reduction="sum")
        count = torch.tensor(len(targets), device=targets.device)
    correct = (logits.argmax(1) == targets).sum()
    return loss, torch.stack([loss.detach().double(), correct.double(), count.double()])


def describe(name: str, sums: Tensor) -> str:
    """Return the means of what `measure` has summed, in all digits."""
    loss, correct, count = sums.tolist()
    return f"{name} loss {loss / count} accuracy {correct / count}"
