"""Whether a loss is a sum over samples, found by a trial on a few samples.

The gradient of such a sum can be computed in parts: local batches, gradient-accumulation steps and
micro-batches. A loss over the batch, such as a contrastive loss or the partial likelihood of Cox,
compares the samples of a batch with each other, so that it is another function of each part.

The trial computes the loss of some samples together and of each sample alone. A loss of samples
that are computed one by one has the same sum both ways, whatever the outputs and the targets are:
the trial may therefore make up both.
"""

import copy
import operator
import pickle
import random
import warnings
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ddp_lab.config.errors import describe_error
from ddp_lab.data.trees import Tree, apply, rows, size, to
from ddp_lab.models.calls import call
from ddp_lab.models.kept_state import state_kept
from ddp_lab.models.outputs import map_outputs, tensors_of
from ddp_lab.models.trial import LARGE, fake_copy, meta_copy
from ddp_lab.tasks.base import Task
from ddp_lab.tasks.made_up_batches import MANY, made_up_batches

EXACT = 1e-6  # relative tolerance for a loss in float64
ROUNDED = 1e-5  # the least one for a loss that computes in a coarser dtype
NOISE = 16  # times the change of such a loss by a rounding of its outputs


class Sums(NamedTuple):
    """The sum of the losses of some samples, and that of their weights."""

    loss: float
    weight: float


class NotRepeatableError(Exception):
    """The loss draws random numbers, or changes its state, so that two calls cannot be compared."""


def is_own(task: Task) -> bool:
    """Return whether the loss is one of ddp_lab's, which are sums over samples."""
    parts = [task] if task.loss is None else [task, task.loss]
    modules = [getattr(part, "__module__", None) or type(part).__module__ for part in parts]
    return all(module.startswith("ddp_lab.") for module in modules)


def describe_coupling(
    task: Task, outputs: Any, targets: Tree, batch_size: int = MANY
) -> str | None:
    """Return how the loss shows that it is not a sum over samples, as the end of "the loss ...".

    Torch's random state stays as it is, and so does the task, which is copied.

    Args:
        task: with the loss.
        outputs: of the model for one or more samples, [m, ...]; on the meta device if only their
            shape is known.
        targets: of one or more samples, [n, ...].
        batch_size: samples of the GLOBAL batch.

    Returns:
        None if it is a sum over samples, or if that cannot be found: it draws random numbers, or
        fails for these samples.
    """
    outputs = map_outputs(
        lambda tensor: tensor.detach() if tensor.is_meta else tensor.detach().cpu(), outputs
    )
    with state_kept(task), warnings.catch_warnings():  # also of a task that cannot be copied
        warnings.simplefilter("ignore")  # such as that of a standard deviation of one sample
        on_cpu = apply(lambda tensor: tensor.detach().cpu(), targets)
        for each_outputs, each_targets in made_up_batches(outputs, on_cpu, batch_size):
            for training in (True, False):  # in evaluation mode dropout draws nothing
                try:
                    difference = compare(copied(task).train(training), each_outputs, each_targets)
                except NotRepeatableError:
                    continue
                if difference:
                    return difference
                break
    return None


def compare(task: Task, outputs: Any, targets: Tree) -> str | None:
    """Return how the loss of some samples together differs from that of each alone, or None.

    Args:
        task: may be changed.
        outputs: in float64.
        targets: as many.

    Raises:
        NotRepeatableError: the loss cannot be computed twice.
    """
    for dtype in (torch.float64, torch.float32):
        task = task.to("cpu", dtype)
        outputs = map_outputs(partial(as_dtype, dtype), outputs)
        targets = apply(partial(as_dtype, dtype), targets)
        try:
            together, result_dtype = sums_of(task, outputs, targets)
        except NotRepeatableError:
            raise
        except Exception:  # it is not made for such outputs or targets, or not for float64
            continue
        return compare_with(task, outputs, targets, together, result_dtype)
    return None


def as_dtype(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a dtype, if its numbers have a fraction."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def compare_with(
    task: Task, outputs: Any, targets: Tree, together: Sums, dtype: torch.dtype
) -> str | None:
    """As `compare`, given the sums over all samples and the coarsest dtype in them."""
    if dtype == torch.float64:
        tolerance = EXACT
    else:
        tolerance = measure_tolerance(task, outputs, targets, together)
    again, _ = sums_of(task, outputs, targets)
    if not all(map(np.isfinite, together)):
        return None

    if not all(is_close(*pair, tolerance) for pair in zip(together, again, strict=True)):
        raise NotRepeatableError
    alone: list[Sums] = []
    count = len(tensors_of(outputs)[0])
    for row in range(count):
        sample = slice(row, row + 1)
        try:
            sums, _ = sums_of(
                task, map_outputs(operator.itemgetter(sample), outputs), rows(targets, sample)
            )
        except NotRepeatableError:
            raise
        except Exception as error:
            return f"fails for one sample: {describe_error(error)}"
        alone.append(sums)

    for name, value, each in zip(
        ("loss", "weight"), together, zip(*alone, strict=True), strict=True
    ):
        size = max(abs(value), sum(map(abs, each)))
        if not is_close(value, sum(each), tolerance, size):
            verb = "is" if name == "loss" else "has the weight"
            return (
                f"{verb} {value:.6g} for {count} samples together, and {sum(each):.6g} for each "
                "alone, in sum"
            )
    return None


def is_close(value: float, other: float, tolerance: float, size: float = 0.0) -> bool:
    """Return whether two sums are equal; NaN equals nothing.

    Args:
        value, other: the sums.
        tolerance: relative to `size`, and absolute if that is below 1.
        size: of the terms.
    """
    return abs(value - other) <= tolerance * max(1.0, size, abs(value))


def measure_tolerance(task: Task, outputs: Any, targets: Tree, together: Sums) -> float:
    """Return the relative tolerance for a loss not in float64: a multiple of its rounding error."""
    eps = torch.finfo(torch.float32).eps
    generator = torch.Generator().manual_seed(1)

    def rounded_off(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        rounding = 2 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) - 1
        return tensor * (1 + eps * rounding)

    with suppress(Exception):
        rounded, _ = sums_of(task, map_outputs(rounded_off, outputs), targets)
        change = abs(rounded.loss - together.loss) / max(1.0, abs(together.loss))
        return max(ROUNDED, NOISE * change)
    return ROUNDED


def sums_of(task: Task, outputs: Any, targets: Tree) -> tuple[Sums, torch.dtype]:
    """Return the sums over some samples, and the coarsest dtype that they were computed in.

    Raises:
        NotRepeatableError: the loss has drawn random numbers.
        Exception: any other one of the loss.
    """
    before = random_states()
    with torch.no_grad():
        loss, weight = task.loss_sum(outputs, targets)
    if random_states() != before:
        raise NotRepeatableError
    return Sums(float(loss), float(weight)), loss.dtype


def outputs_of(model: nn.Module, inputs: Tree) -> Any:
    """Return the outputs of a model in evaluation mode, without a gradient.

    Return None if it fails, or returns no row for a sample.

    The model, torch's random state and the mode of each module stay as they are. Of a large model,
    and of one on the meta device, only the shape of the outputs is computed, if possible.

    Args:
        model: complete.
        inputs: some samples.
    """
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    on_cpu = not on_meta and sum(parameter.numel() for parameter in model.parameters()) <= LARGE
    outputs: object = None
    if not on_cpu:
        with suppress(Exception), torch.no_grad(), state_kept(model, weights=False):
            outputs = call(meta_copy(model).eval(), to(inputs, "meta"))
    if outputs is None and on_meta:
        with suppress(Exception), torch.no_grad(), state_kept(model, weights=False):
            with fake_copy(model) as copied:
                outputs = call(copied.eval(), to(inputs, "cpu"))
            outputs = map_outputs(as_meta, outputs)
    elif outputs is None:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        with suppress(Exception), torch.no_grad(), state_kept(model):
            outputs = call(model.eval(), to(inputs, device))
    is_batch = not isinstance(outputs, torch.Tensor) or outputs.shape[:1] == (size(inputs),)
    return outputs if is_batch else None


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the meta device of the shape of another one."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def copied(task: Task) -> Task:
    """Return a copy of a task, whose state a trial may change; itself if it cannot be copied."""
    try:
        return copy.deepcopy(task)
    except Exception:
        return task


def random_states() -> tuple[object, ...]:
    """Return the states of the global generators of torch, Python and NumPy, comparable."""
    # its text would take 3 ms
    numpy_state = pickle.dumps(np.random.get_state(legacy=False))
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy_state
