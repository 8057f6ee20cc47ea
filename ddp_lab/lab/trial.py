"""The trial of a model in a Lab: that of train.py, with two copies of the user's example."""

from typing import Any

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError, TrainingError, describe_error
from ddp_lab.data.dataset import InMemory
from ddp_lab.models.trial import LossError, Trial, freeze_unused, random_like
from ddp_lab.strategies.base import Strategy
from ddp_lab.tasks.base import Task, in_float32


def try_model(model: nn.Module, task: Task, example: Any, strategy: Strategy) -> list[str]:
    """Freeze the parameters that training never uses, as train.py does. Collective.

    Without a target no loss can be computed, so nothing is tried.

    Args:
        model: the complete model, on the CPU or on a device, where it stays. Only `requires_grad`
            of what is frozen changes.
        task: with the loss.
        example: a sample, (input, target); or its input; or None.
        strategy: before `partition`.

    Returns:
        Notes about what is frozen.

    Raises:
        ConfigError: model or loss fail for the sample, or the ranks would freeze different
            parameters; on all ranks.
    """
    if not (isinstance(example, (tuple, list)) and len(example) == 2):
        return []
    runtime = strategy.runtime
    freezes = not strategy.may_leave_unused
    trial = make_trial(example[0], example[1], task.to(runtime.device), freezes)
    problem, notes = "", list[str]()
    try:
        strategy.idle, notes = freeze_unused(model, trial, runtime, "the model")
    except ConfigError as error:
        problem = str(error)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    runtime.conclude("trial", [problem, trained], require_same_trial)
    return notes


def make_trial(inputs: torch.Tensor, target: Any, task: Task, freezes: bool) -> Trial:
    """Return what the model is tried with: a sample, twice; inputs that have a fraction are random.

    Args:
        inputs: of a sample.
        target: of the sample, a tensor or a number.
        task: on the device.
        freezes: as in `Trial`.

    Raises:
        ConfigError: the target is neither a tensor nor a number.
    """
    try:
        samples = InMemory(inputs[None], torch.as_tensor(target)[None])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"example: the target of a sample must be a tensor or a number, got {type(target).__name__} ({error})"
        ) from None
    pair: list[torch.Tensor] = []
    for tensor, (shape, dtype) in zip((samples.inputs, samples.targets), samples.forms, strict=True):
        pair.append(tensor.expand(2, *shape).to("cpu", dtype).contiguous())

    def check(outputs: torch.Tensor) -> None:
        targets = pair[1].to(outputs.device)
        try:
            task.loss_sum(in_float32(outputs), targets)
        except TrainingError as error:  # its message says what is wrong
            raise ConfigError(str(error)) from None
        except Exception as error:
            raise LossError(
                f"loss: failed for outputs of {list(outputs.shape)} and targets of "
                f"{list(targets.shape)}, {targets.dtype}, which are two copies of the example: "
                f"{describe_error(error)}. Correct the loss, or the last layer of the model"
            ) from None

    return Trial(random_like(pair[0]), check, of_all=True, freezes=freezes)


def require_same_trial(found: list[list[Any]]) -> None:
    """Check what the trials of all ranks have found: a problem, and the trained parameters.

    Raises:
        ConfigError: there is a problem, or the names differ.
    """
    for problem, _ in found:
        if problem:
            raise ConfigError(problem)
    for rank, (_, trained) in enumerate(found):
        if different := sorted({*trained} ^ {*found[0][1]}):
            raise ConfigError(
                f"example: for that of rank {rank} the model uses other parameters than for that of "
                f"rank 0, for example {different[0]}. Give the same example on all ranks, for example dataset[0]"
            )
