"""What the trainings of tests/peers/ have in common: model, samples with weights, loss and numbers.

Everything is float64. A target is a class and the weight of the sample.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

RANKS = 2
ACCUMULATE = 2
MICRO_BATCH = 2  # samples of a rank
BATCH = RANKS * ACCUMULATE * MICRO_BATCH  # of the global batch
LEARNING_RATE = 0.5
MOMENTUM = 0.9
MAX_NORM = 0.4  # every step of these trainings is clipped but those that a test is about
FEATURES = 6
CLASSES = 5

Weights = dict[str, torch.Tensor]


def net() -> nn.Sequential:
    """Return the model, always with the same weights."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def samples(number: int, weighted: bool) -> TensorDataset:
    """Return samples whose weights are between 1 and 10, or all 1."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(number, FEATURES, generator=generator, dtype=torch.float64)
    classes = torch.randint(CLASSES, [number], generator=generator).double()
    weights = torch.randint(1, 11, [number], generator=generator).double()
    if not weighted:
        weights = torch.ones_like(weights)
    return TensorDataset(inputs, torch.stack([classes, weights], dim=1))


def losses_and_weights(
    outputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the unreduced losses and their weights, each [b]."""
    classes, weights = targets.unbind(1)
    return F.cross_entropy(outputs, classes.long(), reduction="none"), weights


def loss_sum(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of the losses, []."""
    losses, weights = losses_and_weights(outputs, targets)
    return (losses * weights).sum()


def local_mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean of the losses of a micro-batch, [], as most users write it."""
    return loss_sum(outputs, targets) / targets[:, 1].sum()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def weights_of(model: nn.Module) -> Weights:
    """Return copies of the complete parameters by name. Collective if they are sharded."""
    full = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        gather = getattr(value, "full_tensor", value.clone)
        full[name] = gather()
    return full
