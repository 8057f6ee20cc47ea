"""Losses as users write them: of each sample alone (SUMS), and over the batch (OVER_BATCH).

Each is a function of (outputs, targets), and has the name of the targets that it is for, as in
TARGETS of tests/tasks/test_over_batch.py.
"""

import random
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ddp_lab.tasks import Regression

CLASSES = 5


def focal(logits, targets):
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses * (1 - (-losses).exp()) ** 2


def dice(logits, targets):
    """The Dice loss of each sample, of logits [b, c, h, w] and classes [b, h, w]."""
    expected = F.one_hot(targets, logits.size(1)).movedim(-1, 1)
    shares = logits.softmax(1)
    both = (shares * expected).flatten(1).sum(1)
    return 1 - (2 * both + 1) / (shares.flatten(1).sum(1) + expected.flatten(1).sum(1) + 1)


def distillation(logits, teacher):
    """The divergence from a teacher's logits, at a temperature of 2."""
    return 4 * F.kl_div(
        (logits / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="none"
    ).sum(1)


def class_weighted(logits, targets):
    """The weighted mean, as of nn.CrossEntropyLoss(weight=...)."""
    weights = torch.linspace(0.5, 2, CLASSES, dtype=torch.float32)[targets]
    return F.cross_entropy(logits, targets, reduction="none"), weights


def ignoring(logits, targets):
    losses = F.cross_entropy(logits, targets, ignore_index=1, reduction="none")
    return losses, (targets != 1).float()


def in_float32(logits, targets):
    """Class weights in float32, with which torch refuses logits in float64."""
    return F.cross_entropy(
        logits, targets, weight=torch.linspace(0.5, 2, CLASSES), reduction="none"
    )


def of_probabilities(shares, targets):
    """A loss of numbers from 0 to 1, which torch checks."""
    return F.binary_cross_entropy(shares, targets, reduction="none")


def of_positive(rates, targets):
    """A loss that is NaN for most random outputs."""
    return rates - targets * rates.log()


class Noisy(nn.Module):
    """Dropout of the logits."""

    def forward(self, logits, targets):
        return F.cross_entropy(F.dropout(logits, 0.5, self.training), targets, reduction="none")


def jittered(outputs, targets):
    """Random numbers of Python, in each call."""
    return (outputs - targets).square() * (1 + 0.1 * random.random())


class Counting(nn.Module):
    """A loss that grows with each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs, targets):
        self.calls += 1
        return (outputs - targets).square() * self.calls


def of_checked(outputs, targets):
    """A loss that takes no negative targets."""
    if (targets < 0).any():
        raise ValueError("targets must not be negative")
    return (outputs - targets).square()


def by_sign(outputs, targets):
    """Weights by the sign of the target of the sample itself."""
    losses = (outputs - targets).square().mean(1)
    return losses, torch.where(targets[:, 0] > 0, 3.0, 1.0).to(losses.dtype)


SUMS = {
    "without negative targets": ("counts", of_checked),
    "weights by sign": ("numbers", by_sign),
    "cross entropy": ("classes", partial(F.cross_entropy, reduction="none")),
    "label smoothing": ("classes", partial(F.cross_entropy, reduction="none", label_smoothing=0.1)),
    "class weights": ("classes", class_weighted),
    "weights in float32": ("classes", in_float32),
    "focal": ("classes", focal),
    "ignored": ("classes", ignoring),
    "module": (
        "classes",
        nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, CLASSES), reduction="none"),
    ),
    "mixup": ("shares", partial(F.cross_entropy, reduction="none")),
    "pixels": ("masks", partial(F.cross_entropy, reduction="none", ignore_index=2)),
    "dice": ("masks", dice),
    "binary": (
        "labels",
        partial(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor(3.0), reduction="none"),
    ),
    "probabilities": ("labels", of_probabilities),
    "distillation": ("numbers", distillation),
    "squared error": ("numbers", partial(F.mse_loss, reduction="none")),
    "huber": ("numbers", partial(F.huber_loss, reduction="none")),
    "poisson": ("counts", of_positive),
    "dropout": ("classes", Noisy()),
    "random numbers of Python": ("numbers", jittered),
    "counting": ("numbers", Counting()),
}


def info_nce(outputs, targets):
    """Each output is to be nearest to its own target in the batch (van den Oord et al. 2018)."""
    similar = F.normalize(outputs, dim=1) @ F.normalize(targets.to(outputs.dtype), dim=1).T
    return F.cross_entropy(
        similar / 0.1, torch.arange(len(outputs), device=outputs.device), reduction="none"
    )


def supervised_contrastive(outputs, targets):
    """Outputs of one class are to be alike (Khosla et al. 2020).

    A sample without a partner has no loss.
    """
    features = F.normalize(outputs, dim=1)
    itself = torch.eye(len(outputs), dtype=torch.bool, device=outputs.device)
    log_shares = (features @ features.T / 0.1).masked_fill(itself, -1e9).log_softmax(1)
    partners = (targets[:, None] == targets) & ~itself
    return -(log_shares * partners).sum(1) / partners.sum(1).clamp(min=1)


def triplet(outputs, targets):
    """The hardest positive and negative in the batch (Hermans et al. 2017); 0 without both."""
    distances = torch.cdist(outputs, outputs)
    same = targets[:, None] == targets
    alone = same.sum(1) < 2
    farthest = distances.masked_fill(~same, 0).amax(1)
    nearest = distances.masked_fill(same, 1e9).amin(1)
    return F.relu(farthest - nearest + 0.2).masked_fill(alone, 0)


def cox(outputs, targets):
    """The negative partial log-likelihood of times and events, [b, 2], for risks [b, 1]."""
    times, events = targets.unbind(1)
    at_risk = times[None] >= times[:, None]
    risks = outputs[:, 0].expand(len(outputs), -1).masked_fill(~at_risk, -1e9)
    return (risks.logsumexp(1) - outputs[:, 0]) * events


def auc(outputs, targets):
    """A squared surrogate of the area under the curve; needs a positive and a negative sample."""
    positive = outputs[targets == 1]
    negative = outputs[targets == 0]
    if not len(positive) or not len(negative):
        raise ValueError("needs a positive and a negative sample")
    return (1 - (positive[:, None] - negative)).square().mean().expand(len(outputs))


def standardised(outputs, targets):
    """Outputs divided by their deviation in the batch, which one sample has not."""
    return ((outputs - outputs.mean(0)) / outputs.std(0) - targets).square()


def weights_of_the_batch(logits, targets):
    """Weights that sum to 1 over the batch."""
    weights = torch.linspace(0.5, 2, CLASSES, dtype=logits.dtype)[targets]
    return F.cross_entropy(logits, targets, reduction="none"), weights / weights.sum()


def hard_examples(logits, targets):
    """Only the harder half of the batch counts."""
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses, (losses >= losses.median()).to(losses.dtype)


def without_outliers(outputs, targets):
    """A sample does not count if its loss is three standard deviations above the mean."""
    losses = (outputs - targets).square().mean(1)
    scores = (losses - losses.mean()) / (losses.std(correction=0) + 1e-6)
    return losses, (scores < 3).to(losses.dtype)


def in_large_batches(outputs, targets):
    """Of 16 samples and more, those with a large loss do not count."""
    losses = (outputs - targets).square().mean(1)
    small = losses < 2 * losses.median()
    return losses, torch.where(torch.tensor(len(losses) < 16), 1, small.to(losses.dtype))


def triplet_of_signs(outputs, targets):
    """The hardest positive and negative, of classes by the sign of the first target."""
    return triplet(outputs, targets[:, 0] > 0)


def auc_of_signs(outputs, targets):
    """The surrogate of the area under the curve, of targets above 0; 0 without both classes."""
    positive = targets[:, 0] > 0
    scores = outputs[:, 0]
    differences = F.softplus(scores - scores[:, None]) * (positive[:, None] & ~positive)
    return differences.sum(1) / (~positive).sum().clamp(min=1)


def of_checked_signs(outputs, targets):
    """The same of labels 1 and -1 only."""
    if not (targets.abs() == 1).all():
        raise ValueError("labels must be 1 or -1")
    return auc_of_signs(outputs[:, None], targets[:, None])


def above(threshold, outputs, targets):
    """Weights of the two classes around a threshold, by their numbers in the batch."""
    losses = (outputs - targets).square().flatten(1).mean(1)
    positive = targets.flatten(1)[:, 0] > threshold
    share = positive.to(losses.dtype).mean().clamp(0.05, 0.95)
    return losses, torch.where(positive, 1 / share, 1 / (1 - share))


def ratings_above(threshold, outputs, targets):
    """The same of integer targets, [b]."""
    return above(threshold, outputs[:, :1], targets[:, None])


OVER_BATCH = {
    "triplet of signs": ("numbers", triplet_of_signs),
    "AUC of signs": ("numbers", auc_of_signs),
    "AUC of labels 1 and -1": ("signs", of_checked_signs),
    "class counts by sign": ("numbers", partial(above, 0)),
    "class counts by a threshold": ("numbers", partial(above, 3)),
    "class counts of integers": ("counts", partial(above, 10)),
    "class counts of ratings": ("classes", partial(ratings_above, 6)),
    "InfoNCE": ("numbers", info_nce),
    "supervised contrastive": ("classes", supervised_contrastive),
    "triplet": ("classes", triplet),
    "Cox": ("times", cox),
    "AUC": ("events", auc),
    "batch-normalised": ("numbers", standardised),
    "normalised weights": ("classes", weights_of_the_batch),
    "hard examples": ("classes", hard_examples),
    "without outliers": ("numbers", without_outliers),
    "in large batches": ("numbers", in_large_batches),
}


class Contrastive(Regression):
    """A task with a loss over the batch."""

    def loss_fn(self, outputs, targets):
        return info_nce(outputs, targets)
