"""Outputs and targets that are no tensor but a tuple, dict or object of tensors, for a task."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.trees import Tree, rows, to
from ddp_lab.models.outputs import describe_content, map_outputs, tensors_of
from ddp_lab.tasks.base import Task, in_float32

LOGITS = "logits"


class TaskInputs(NamedTuple):
    """Outputs and targets as a task takes them.

    Attributes:
        outputs, targets: without padding if they count.
        counts: whether they count; False if all samples are padding that cannot be cut from the
            outputs.
    """

    outputs: Any
    targets: Any
    counts: bool


def for_task(task: Task, outputs: Any, targets: Tree, num_valid: int) -> TaskInputs:
    """Return outputs and targets as a task takes them.

    Args:
        task: with its loss.
        outputs: of the model. Those that are no tensor have no padding, unless there is nothing
            else.
        targets: with padding at the end.
        num_valid: number of samples without padding.

    Raises:
        ConfigError: the task needs one tensor of each, and gets something else.
    """
    if task.takes_logits:
        require_tensor_targets(targets, type(task).__name__)
    taken = outputs_for(task, outputs)
    if isinstance(taken, torch.Tensor):
        taken = taken[:num_valid]
    elif num_valid == 0:
        return TaskInputs(taken, targets, False)
    return TaskInputs(taken, rows(targets, slice(num_valid)), True)


def outputs_for(task: Task, outputs: Any, source: str = "the model") -> Any:
    """Return outputs as a task takes them: one tensor or all, in float32 for half precision.

    Args:
        task: with its loss.
        outputs: of the model.
        source: what returns them; begins the message.

    Raises:
        ConfigError: the task needs one tensor, and there is none.
    """
    if task.takes_logits:
        outputs = logits_of(outputs, type(task).__name__, source)
    return map_outputs(in_float32, outputs)


def targets_for(task: Task, targets: Tree, device: torch.device) -> Tree:
    """Return targets as a task takes them, on a device.

    Raises:
        ConfigError: the task needs one tensor, and they are none.
    """
    if task.takes_logits:
        require_tensor_targets(targets, type(task).__name__)
    return to(targets, device)


def device_of(outputs: Any) -> torch.device:
    """Return the device of the outputs of a model; the CPU if they have no tensor."""
    return next((tensor.device for tensor in tensors_of(outputs)), torch.device("cpu"))


def logits_of(outputs: Any, task: str, source: str = "the model") -> torch.Tensor:
    """Return the one tensor of outputs that a task needs: themselves, or their part `logits`.

    Args:
        outputs: of the model.
        task: name of the task, for the message.
        source: what returns them; begins the message.

    Raises:
        ConfigError: there is no such tensor.
    """
    logits = outputs
    if not isinstance(outputs, torch.Tensor):
        if isinstance(outputs, Mapping):
            logits = outputs.get(LOGITS)
        else:
            logits = getattr(outputs, LOGITS, None)
    if isinstance(logits, torch.Tensor):
        return logits
    content, place = describe_content(outputs)
    raise ConfigError(
        f"{source} returns {content}, but {task} needs one tensor [b, ...] for b samples, or a "
        f"part named {LOGITS}. Wrap it in a module of a few lines, whose forward ends with `return "
        f"self.model(inputs){place}`; or use a loss function, which gets the outputs as they are"
    )


def require_tensor_targets(targets: Tree, task: str) -> None:
    """Raise a ConfigError unless targets are one tensor, as `task`, a name, needs them."""
    if isinstance(targets, torch.Tensor):
        return
    parts = f" with {', '.join(map(str, targets))}" if isinstance(targets, dict) else ""
    if targets is None:
        description = "no targets"
    else:
        description = f"targets that are a {type(targets).__name__}{parts}"
    raise ConfigError(
        f"{task}: needs targets that are one tensor [b, ...], got {description}. Choose one by "
        "`targets`, or use a loss function, which gets them as they are"
    )
