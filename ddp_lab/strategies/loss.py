"""The loss and the metrics of a batch, as sums over samples, which can be added over micro-batches, steps and ranks."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hydra.utils import get_object
from omegaconf import DictConfig
from torch import nn

from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.config.types import Fraction
from ddp_lab.data.batch import IGNORE, classes_of


class Loss(nn.Module, ABC):
    """A loss that is summed over samples; padding does not count.

    `Strategy.train` switches its mode together with the model's: evaluation mode is that of the test loss.
    """

    @abstractmethod
    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum over the samples that are not padding, []; without such samples it is 0.

        Args:
            logits: [b, classes].
            targets: [b], IGNORE for padding; or mixed ones, [b, classes] (data/augment.py).
        """


class CrossEntropy(Loss):
    """The cross-entropy. The test loss is computed without label smoothing, as by timm, so that it is the same for any recipe.

    Args:
        label_smoothing: probability mass that is taken from the target and spread evenly over all classes (Szegedy et al. 2016,
            arXiv:1512.00567).
    """

    def __init__(self, label_smoothing: Fraction = 0.0):
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        smoothing = self.label_smoothing if self.training else 0.0
        if targets.dim() == 2:
            losses = F.cross_entropy(in_float32(logits), targets, reduction="none", label_smoothing=smoothing)
            return losses_without_padding(losses, targets).sum()
        return F.cross_entropy(in_float32(logits), targets, reduction="sum", ignore_index=IGNORE, label_smoothing=smoothing)


class OwnLoss(Loss):
    """A loss of the user's.

    Args:
        function: returns the loss of each sample, [b], for logits [b, classes] and class indices [b], or mixed targets
            [b, classes].
    """

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = self.function(in_float32(logits), targets.clamp(min=0))  # IGNORE may not be used as an index
        return losses_without_padding(losses, targets).sum()


def losses_without_padding(losses: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the losses, [b], with 0 in place of those of padding."""
    return torch.where(classes_of(targets) != IGNORE, losses, 0)


def in_float32(logits: torch.Tensor) -> torch.Tensor:
    """Return logits in bf16 as float32, because bf16's 8 bits are too coarse for a sum."""
    return logits.float() if logits.dtype == torch.bfloat16 else logits


def build_loss(node: DictConfig | dict[str, Any], num_classes: int, mixed: bool = False) -> Loss:
    """Construct the loss that `_target_` names: a class, which is called once, or a function, which is the loss itself.

    Either is given reduction="none" if it has a parameter of that name.

    Args:
        node: the config group `loss`.
        num_classes: number of classes of the dataset.
        mixed: whether it gets mixed targets.

    Raises:
        ConfigError: the constructor fails, the loss of two samples fails or is not a loss per sample, the loss has trainable
            parameters, or it does not support mixed targets.
    """
    key = f"loss._target_={node['_target_']}"
    target = get_object(node["_target_"])
    arguments = {"reduction": "none"} if "reduction" in inspect.signature(target).parameters else {}
    try:
        built = build(node, **arguments, _partial_=not inspect.isclass(target))
    except Exception as error:
        raise ConfigError(f"{key}: cannot be constructed: {describe_error(error)}") from None
    if isinstance(built, Loss):
        return built
    if isinstance(built, nn.Module) and (names := [name for name, _ in built.named_parameters()]):
        raise ConfigError(
            f"{key}: has the parameter {names[0]}, which no optimizer would train; make it a part of the model, or a buffer"
        )
    targets = torch.arange(2) % num_classes
    require_losses(built, targets, num_classes, f"{key}: must return a loss per sample, [b], and not reduce them")
    if mixed:
        about = (
            f"{key}: does not support mixup and cutmix, whose targets are probabilities [b, classes]. Use mixup=0 cutmix=0, or "
            "loss=cross_entropy"
        )
        require_losses(built, F.one_hot(targets, num_classes).float(), num_classes, about)
    return OwnLoss(built)


def require_losses(function: Any, targets: torch.Tensor, num_classes: int, about: str) -> None:
    """Check that a function of logits [b, classes] and targets returns the loss of each sample, [b].

    Raises:
        ConfigError: it does not; the message is `about` and what it does for two samples.
    """
    try:
        losses = function(torch.zeros(len(targets), num_classes, requires_grad=True), targets)
    except Exception as error:
        raise ConfigError(f"{about}. For b=2 it failed: {describe_error(error)}") from None
    found = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
    if found != [len(targets)]:
        raise ConfigError(f"{about}. For b=2 it returned {found}")
    if not losses.requires_grad:
        raise ConfigError(f"{about}. For b=2 it returned a tensor without a gradient")


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


def measure(loss: Loss, logits: torch.Tensor, targets: torch.Tensor, divisor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss to backpropagate, [], and the sums [loss_sum, correct, count].

    The loss to backpropagate is the sum divided by `divisor` (`Strategy.divisor`).

    Args:
        logits: [b, classes].
        targets: [b], IGNORE for padding; or mixed ones, [b, classes].
    """
    loss_sum = loss(logits, targets)
    return loss_sum / divisor, sums(loss_sum, logits, targets)
