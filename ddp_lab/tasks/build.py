"""The checks of a loss of the user's, and the name of a task's own one."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.models.kept_state import state_kept
from ddp_lab.tasks.loss_trial import trial_of_loss


def default() -> None:
    """Stand for the task's own loss, as `_target_` of the config group `loss`."""


def check_loss_function(built: Any, key: str, num_classes: int | None, mixed: bool) -> None:
    """Check a loss of the user's before the run.

    Args:
        built: the loss.
        key: key and value that chose it, for messages.
        num_classes: number of classes of the dataset; None: the task is not classification, and the
            loss is not tried.
        mixed: whether it gets mixed targets.

    Raises:
        ConfigError: the loss of two samples fails or is not a loss per sample, the loss has
            trainable parameters, or it does not support mixed targets.
    """
    names = []
    if isinstance(built, nn.Module):
        names = [name for name, _ in built.named_parameters()]
    if names:
        raise ConfigError(
            f"{key}: has the parameter {names[0]}, which no optimizer would train; make it a part "
            "of the model, or a buffer"
        )

    if num_classes is None:
        return
    targets = torch.arange(2) % num_classes
    if problem := describe_losses(built, targets, num_classes):
        raise ConfigError(
            f"{key}: must return a loss per sample, [b], for logits [b, classes] and targets [b]; "
            f"for b=2 it {problem}"
        )

    if not mixed:
        return
    probabilities = F.one_hot(targets, num_classes).float()
    if problem := describe_losses(built, probabilities, num_classes):
        raise ConfigError(
            f"{key}: does not support mixup and cutmix, whose targets are probabilities [b, "
            f"classes]; for b=2 it {problem}. Use mixup=0 cutmix=0, or loss=cross_entropy"
        )


def describe_losses(function: Any, targets: torch.Tensor, num_classes: int) -> str | None:
    """Return what is wrong with a loss for `targets`, as the end of "it ...", or None."""
    try:
        with state_kept(function), trial_of_loss():
            losses = function(torch.zeros(len(targets), num_classes, requires_grad=True), targets)
    except Exception as error:
        return f"failed: {describe_error(error)}"
    if isinstance(losses, tuple):
        return (
            "returned a tuple. (losses, weights) or (sum, weight) need "
            "task._target_=ddp_lab.tasks.Task, which has no accuracy"
        )
    if not isinstance(losses, torch.Tensor):
        return f"returned {type(losses).__name__}"
    if losses.shape != targets.shape[:1]:
        return (
            f"returned a tensor of shape {list(losses.shape)}. Do not reduce the losses: ddp_lab "
            "divides their sum by the size of the global batch. A loss that is one number for a "
            "batch returns it for each sample, loss.expand(len(logits))"
        )
    return None if losses.requires_grad else "returned a tensor without a gradient"
