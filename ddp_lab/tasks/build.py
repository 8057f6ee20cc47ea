"""Construction of a task with the loss that the config names."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from hydra.utils import get_object
from omegaconf import DictConfig
from torch import nn

from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.tasks.base import LossFunction
from ddp_lab.tasks.classification import CrossEntropy


def default() -> None:
    """Stand for the task's own loss, as `_target_` of the config group `loss`."""


def build_loss(node: DictConfig | dict[str, Any], num_classes: int | None = None, mixed: bool = False) -> LossFunction | None:
    """Construct the loss that `_target_` names: a class, which is called once, or a function, which is the loss itself.

    Either is given reduction="none" if it has a parameter of that name.

    Args:
        node: the config group `loss`.
        num_classes: number of classes of the dataset; None: the task is not classification, and the loss is not tried.
        mixed: whether it gets mixed targets.

    Raises:
        ConfigError: the constructor fails, the loss of two samples fails or is not a loss per sample, the loss has trainable
            parameters, or it does not support mixed targets.
    """
    if get_object(node["_target_"]) is default:
        return None
    key = f"loss._target_={node['_target_']}"
    target = get_object(node["_target_"])
    arguments = {"reduction": "none"} if "reduction" in inspect.signature(target).parameters else {}
    try:
        built = build(node, **arguments, _partial_=not inspect.isclass(target))
    except Exception as error:
        raise ConfigError(f"{key}: cannot be constructed: {describe_error(error)}") from None
    if isinstance(built, CrossEntropy):
        return built
    if isinstance(built, nn.Module) and (names := [name for name, _ in built.named_parameters()]):
        raise ConfigError(
            f"{key}: has the parameter {names[0]}, which no optimizer would train; make it a part of the model, or a buffer"
        )
    if num_classes is None:
        return built
    targets = torch.arange(2) % num_classes
    if problem := describe_losses(built, targets, num_classes):
        raise ConfigError(
            f"{key}: must return a loss per sample, [b], for logits [b, classes] and targets [b]; for b=2 it {problem}"
        )
    if mixed and (problem := describe_losses(built, F.one_hot(targets, num_classes).float(), num_classes)):
        raise ConfigError(
            f"{key}: does not support mixup and cutmix, whose targets are probabilities [b, classes]; for b=2 it {problem}. "
            "Use mixup=0 cutmix=0, or loss=cross_entropy"
        )
    return built


def describe_losses(function: Any, targets: torch.Tensor, num_classes: int) -> str | None:
    """Return what is wrong with a loss for `targets`, as the end of "it ..."; None if it is a loss per sample."""
    try:
        losses = function(torch.zeros(len(targets), num_classes, requires_grad=True), targets)
    except Exception as error:
        return f"failed: {describe_error(error)}"
    if not isinstance(losses, torch.Tensor):
        return f"returned {type(losses).__name__}"
    if losses.shape != targets.shape[:1]:
        return (
            f"returned a tensor of shape {list(losses.shape)}. Do not reduce the losses: ddp_lab divides their sum by the size "
            "of the global batch. A loss that is one number for a batch returns it for each sample, loss.expand(len(logits))"
        )
    return None if losses.requires_grad else "returned a tensor without a gradient"
