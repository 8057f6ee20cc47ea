"""The trial of a model in a Lab: that of train.py, with two copies of the user's example."""

from typing import Any

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError, TrainingError, describe_error
from ddp_lab.lab.example import Example
from ddp_lab.models.outputs import tensors_of
from ddp_lab.models.trial import LossError, Trial, freeze_unused, random_like
from ddp_lab.strategies.base import Strategy
from ddp_lab.tasks.base import Task
from ddp_lab.tasks.loss_trial import trial_of_loss
from ddp_lab.tasks.nested import device_of, outputs_for, targets_for


def try_model(
    model: nn.Module, task: Task, example: Example | None, strategy: Strategy
) -> tuple[frozenset[str], list[str]]:
    """Freeze the parameters that training never uses, as train.py does. Collective.

    Without a target no loss can be computed, so nothing is tried.

    Args:
        model: the complete model, on the CPU or on a device, where it stays. Only `requires_grad`
            of what is frozen changes.
        task: with the loss.
        example: of a sample; None: there is none.
        strategy: before `partition`.

    Returns:
        The names of the parameters that are frozen, and notes about them.

    Raises:
        ConfigError: model or loss fail for the sample, or the ranks would freeze different
            parameters; on all ranks.
    """
    if example is None or not example.is_complete:
        return frozenset(), []
    runtime = strategy.runtime
    freezes = not strategy.may_leave_unused
    trial = make_trial(example, task.to(runtime.device), freezes)
    problem = ""
    idle = frozenset[str]()
    notes = list[str]()
    try:
        idle, notes = freeze_unused(model, trial, runtime, "the model")
    except ConfigError as error:
        problem = str(error)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    runtime.gather_and_decide("trial", [problem, trained], require_same_trial)
    return idle, notes


def make_trial(example: Example, task: Task, freezes: bool) -> Trial:
    """Return what the model is tried with: a sample, twice; inputs that have a fraction are random.

    Args:
        example: a complete one.
        task: on the device.
        freezes: as in `Trial`.
    """

    def check(outputs: Any) -> torch.Tensor:
        taken = outputs_for(task, outputs, "it")
        targets = targets_for(task, example.targets, device_of(taken))
        try:
            with trial_of_loss():
                loss, _ = task.loss_sum(taken, targets)
        except TrainingError as error:  # its message says what is wrong
            raise LossError(str(error)) from None
        except Exception as error:
            raise LossError(
                f"loss: failed for outputs of {describe_parts(taken)} and targets of "
                f"{describe_parts(targets, with_dtype=True)}, which are two copies of the example: "
                f"{describe_error(error)}. Correct the loss, or the last layer of the model"
            ) from None
        return loss

    return Trial(random_like(example.inputs), check, of_all=True, freezes=freezes)


def describe_parts(values: Any, with_dtype: bool = False) -> str:
    """Return the shapes of outputs or targets, for a message."""
    if isinstance(values, torch.Tensor):
        return f"{list(values.shape)}, {values.dtype}" if with_dtype else str(list(values.shape))
    shapes = [str(list(tensor.shape)) for tensor in tensors_of(values)]
    return f"{type(values).__name__} ({', '.join(shapes)})"


def require_same_trial(results: list[list[Any]]) -> None:
    """Check what the trials of all ranks have found: a problem, and the trained parameters.

    Raises:
        ConfigError: there is a problem, or the names differ.
    """
    for problem, _ in results:
        if problem:
            raise ConfigError(problem)
    for rank, (_, trained) in enumerate(results):
        if different := sorted({*trained} ^ {*results[0][1]}):
            raise ConfigError(
                f"example: for that of rank {rank} the model uses other parameters than for that "
                f"of rank 0, for example {different[0]}. Give the same example on all ranks, for "
                "example dataset[0]"
            )
