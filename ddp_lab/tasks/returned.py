"""What a loss may return besides one tensor, and the messages about what it may not.

Where there is not one loss for each sample, as in detection and CTC, a loss returns the sum of the
batch and its weight. The weight is known only after the loss, and differs between ranks and
micro-batches, so that it is summed as the loss is.
"""

import math
from typing import Any

import torch

from ddp_lab.config.errors import SampleError, TrainingError, count
from ddp_lab.models.outputs import tensors_of

UNREDUCED = (
    "Use reduction='none': the sum is divided by the weight of the global batch; or return (sum, "
    "weight), both of shape []. A loss that is one number for a batch returns it for each sample, "
    "loss.expand(len(outputs))"
)


def as_pair(returned: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a loss has returned in place of one tensor, which must be a pair of them.

    Raises:
        TrainingError: it is something else.
    """
    is_tuple = isinstance(returned, tuple)
    if is_tuple and len(returned) == 2 and all(isinstance(part, torch.Tensor) for part in returned):
        return returned
    kind = type(returned).__name__
    got = f"a tuple of {len(returned)}: {names_of(returned)}" if is_tuple else kind
    advice = "Return one of these"
    if isinstance(returned, (int, float)):
        advice = "Return the tensor, without .item()"
    elif isinstance(returned, dict):
        advice = "Add its parts to one loss"
    elif is_tuple and len(returned) == 2 and isinstance(returned[1], (int, float)):
        advice = "A number as the weight is torch.tensor(number)"
    raise TrainingError(
        f"the loss must return a tensor, (losses, weights) or (sum, weight), got {got}. {advice}"
    )


def names_of(parts: tuple[Any, ...]) -> str:
    """Return the types of some values."""
    return ", ".join(type(part).__name__ for part in parts)


def require_losses(losses: torch.Tensor, weights: torch.Tensor, samples: int) -> None:
    """Check that a loss has returned a loss for each sample, and weights of the same shape.

    Args:
        losses, weights: what it has returned; the same tensor if it has returned no weights.
        samples: number of samples.

    Raises:
        TrainingError: it has not.
    """
    shape = list(losses.shape)
    if losses.shape[:1] != (samples,) and losses is weights:
        raise TrainingError(
            f"the loss must return unreduced losses, [{samples}, ...] for "
            f"{count(samples, 'sample')}, got "
            f"{shape}. {UNREDUCED}"
        )
    if losses.shape[:1] != (samples,):
        raise TrainingError(
            f"the loss must return a loss for each sample, [{samples}, ...] for "
            f"{count(samples, 'sample')}, "
            f"with its weights, got {shape} and {list(weights.shape)}. Return losses and weights "
            "of one shape, or their sums, both of shape []"
        )
    if weights.shape != losses.shape:
        raise TrainingError(
            f"the weights of a loss must have the shape of its losses, {shape}, got "
            f"{list(weights.shape)}"
        )


def checked_sums(
    total: torch.Tensor, weight: torch.Tensor, weighted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of a batch, [], and its weight, [], on the device of the sum.

    The value of the weight is looked at where that costs no wait for a device. Elsewhere the sum of
    a weight that is not allowed becomes NaN, which ends a run, too.

    Args:
        total, weight: what the loss has returned, both [].
        weighted: as of a task.

    Raises:
        TrainingError: `weighted` is False, or the weight needs a gradient.
        SampleError: the weight is negative or not finite.
    """
    if not weighted:
        raise TrainingError(
            "weighted=False declares one loss of weight 1 for each sample, but the loss returned "
            "(sum, weight). Remove the attribute weighted of the loss or the task, or set it to "
            "True"
        )
    if weight.requires_grad:
        raise TrainingError(
            "the weight of the loss needs a gradient, by which a step would not be divided. Use "
            "weight.detach()"
        )
    # fake tensors have no values, and a compiled step does not read them
    has_value = type(weight) is torch.Tensor and not torch.compiler.is_compiling()
    if has_value and weight.device.type == "cpu":
        value = float(weight)
        if not math.isfinite(value) or value < 0:
            raise SampleError(
                f"the weight of the loss is {value:g}; it must be a finite number of at least 0, "
                "such as a number of boxes or tokens"
            )
        return total, weight.to(total.device, non_blocking=True)
    weight = weight.to(total.device, non_blocking=True)
    is_allowed = weight.isfinite() & (weight >= 0)
    return torch.where(is_allowed, total, math.nan), weight


def refuse_weighted_sum(name: str, running: tuple[str, ...]) -> None:
    """Raise the error about training metrics that are weighted as the losses of the samples are,
    where there are none.

    Args:
        name: of the task.
        running: its training metrics.
    """
    raise TrainingError(
        f"{name}: the training metrics {', '.join(running)} are weighted as the losses of the "
        "samples, but the loss returned (sum, weight). Use the loss alone, without a task, and "
        "give the task to evaluate and fit; in a config task._target_=ddp_lab.tasks.Task"
    )


def require_gradient(outputs: Any) -> None:
    """Raise the error about a loss without a gradient, unless its outputs have none either.

    Args:
        outputs: of the model.
    """
    if not any(tensor.requires_grad for tensor in tensors_of(outputs)):
        return
    raise TrainingError(
        "the loss does not depend on the outputs of the model, or was detached from them, so there "
        "is no gradient. Compute it from the outputs with functions of torch, without .item(), "
        ".detach() and numpy"
    )
