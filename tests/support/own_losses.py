"""Losses as users write them, which import nothing of ddp_lab."""

import torch
import torch.nn.functional as F
from torch import nn


class Focal(nn.Module):
    """The focal loss (Lin et al. 2017, arXiv:1708.02002), with a weight per class in a buffer."""

    def __init__(self, gamma: float = 2.0, reduction: str = "mean"):
        super().__init__()
        self.gamma = gamma
        self.reduction = reduction
        self.register_buffer("weights", torch.linspace(0.5, 1.5, 10))

    def forward(self, logits, targets):
        chosen = logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
        losses = -self.weights[targets] * (1 - chosen.exp()) ** self.gamma * chosen
        return losses if self.reduction == "none" else losses.mean()


def scaled(logits, targets, scale: float = 2.0):
    """A function is the loss itself."""
    return scale * F.cross_entropy(logits, targets, reduction="none")


def wrong(logits, targets, how):
    """A function that is no loss, for the reason `how`."""
    losses = F.cross_entropy(logits, targets, reduction="none")
    if how == "failing":
        raise KeyError("weights")
    return {"mean": losses.mean(), "detached": losses.detach(), "number": 1.0}[how]


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, logits, targets):
        return self.scale * F.cross_entropy(logits, targets, reduction="none")


class Unfinished(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = self.missing


class Centred(nn.Module):
    """A loss with a state: it subtracts a running mean of the logits, as DINO does."""

    def __init__(self, classes: int = 10):
        super().__init__()
        self.register_buffer("centre", torch.zeros(classes))

    def forward(self, logits, targets):
        losses = F.cross_entropy(logits - self.centre, targets, reduction="none")
        if torch.is_grad_enabled():
            self.centre.mul_(0.9).add_(0.1 * logits.detach().mean(0))
        return losses


def of_outputs(outputs, targets):
    """Without targets."""
    assert targets is None
    return outputs["logits"].square().sum(1)


def of_large(outputs, targets):
    """Return the sum of the errors of large numbers, and how many there are; not for no sample."""
    assert len(outputs) > 0
    counts = targets > 0.5
    return ((outputs - targets).square() * counts).sum(), counts.sum()


class Replacing(Centred):
    """The same loss, which replaces its buffer by another tensor, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, logits, targets):
        losses = F.cross_entropy(logits - self.centre, targets, reduction="none")
        if torch.is_grad_enabled():
            self.calls += 1
            self.centre = 0.9 * self.centre + 0.1 * logits.detach().mean(0)
        return losses


class CountingCalls(nn.Module):
    """Counts its calls in training, and weighs each sample by its class."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, logits, targets):
        if self.training:
            self.calls += 1
        losses = F.cross_entropy(logits, targets, reduction="none")
        return losses, 1.0 + targets.to(losses.dtype)
