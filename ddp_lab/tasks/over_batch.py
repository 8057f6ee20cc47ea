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
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ddp_lab.config.errors import describe_error
from ddp_lab.data.trees import Tree, apply, rows, size, to
from ddp_lab.models.calls import call
from ddp_lab.models.kept_state import state_kept
from ddp_lab.models.outputs import map_outputs, tensors_of
from ddp_lab.models.trial import LARGE, meta_copy
from ddp_lab.tasks.base import Task

SAMPLES = 8  # of a trial: triplets need three, of which two are alike
# at most, of the trial of a larger batch: of 8 samples none is 3 standard deviations away from the
# mean
MANY = 32
OUTLIER = 100.0  # factor of the outputs of one of them
ELEMENTS = 2**23  # of the outputs of a trial; a single sample may have more
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
        if isinstance(outputs, torch.Tensor) and isinstance(on_cpu, torch.Tensor):
            cases = chain(
                make_cases(outputs, on_cpu), make_large_cases(outputs, on_cpu, batch_size)
            )
        else:
            cases = make_nested_cases(outputs, on_cpu)

        for each_outputs, each_targets in cases:
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
            what = "is" if name == "loss" else "has the weight"
            return (
                f"{what} {value:.6g} for {count} samples together, and {sum(each):.6g} for each "
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


def make_cases(
    outputs: torch.Tensor, targets: torch.Tensor
) -> Generator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield outputs, [count, ...] in float64, and targets, [count, ...], on which a loss is tried.

    Outputs of a model whose last layer is zero are all alike, and the first samples of a sorted
    dataset are of one class: a loss over the batch may then look like a sum. So there are random
    outputs, and targets that differ.
    """
    size = max(1, outputs[0].numel())
    count = max(2, min(SAMPLES, ELEMENTS // size))
    generator = torch.Generator().manual_seed(0)
    shape = (count, *outputs.shape[1:])
    of_outputs = [torch.randn(shape, generator=generator, dtype=torch.float64)]
    rows = torch.arange(count)
    repeated = targets[rows % len(targets)]
    of_targets = [
        repeated,
        *(make_up(repeated, generator) for make_up in ways_to_make_up(repeated)),
    ]
    if count * size <= ELEMENTS:
        # probabilities
        of_outputs.append(torch.rand(shape, generator=generator, dtype=torch.float64))
        of_targets.append(targets[rows * 0])
        if not outputs.is_meta:
            of_outputs.append(between(outputs, count, generator))

    for each_outputs in of_outputs:
        for each_targets in of_targets:
            yield each_outputs, each_targets


def make_nested_cases(outputs: Any, targets: Tree) -> Generator[tuple[Any, Tree]]:
    """Yield cases as `make_cases`, of outputs or targets that are a tuple, a dict or an object.

    There is none if a tensor has no row for each sample, and so cannot be computed for each alone.
    """
    parts = tensors_of(outputs)
    if not parts or any(part.shape[:1] != parts[0].shape[:1] for part in parts):
        return
    generator = torch.Generator().manual_seed(0)
    numbers = torch.arange(SAMPLES)

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[numbers % len(tensor)]

    def drawn(draw: Callable[..., torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return repeated(tensor)
        return draw((SAMPLES, *tensor.shape[1:]), generator=generator, dtype=torch.float64)

    def mixed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return repeated(tensor)
        return between(tensor, SAMPLES, generator)

    of_samples = apply(repeated, targets)
    of_targets = [
        of_samples,
        *(
            apply(partial(make_up, generator=generator), of_samples)
            for make_up in (mixed_targets, opposite_targets, spread_targets)
        ),
    ]
    of_outputs = [map_outputs(partial(drawn, draw), outputs) for draw in (torch.randn, torch.rand)]
    if not any(part.is_meta for part in parts):
        of_outputs.append(map_outputs(mixed, outputs))

    for each_outputs in of_outputs:
        for each_targets in of_targets:
            yield each_outputs, each_targets


def make_large_cases(
    outputs: torch.Tensor, targets: torch.Tensor, batch_size: int
) -> Generator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield cases as `make_cases`, of as many samples as a global batch has, but MANY at most.

    A loss may compare the samples of larger batches only, or leave out a sample that is far from
    all others, of which small batches have none.

    Args:
        outputs, targets: as of `make_cases`.
        batch_size: samples of the GLOBAL batch.
    """
    size = max(1, outputs[0].numel())
    count = min(MANY, batch_size, ELEMENTS // size)
    if count <= SAMPLES:
        return

    generator = torch.Generator().manual_seed(2)
    shape = (count, *outputs.shape[1:])
    mixed = mixed_targets(targets[torch.arange(count) % len(targets)], generator)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    with_outlier = normal.clone()
    with_outlier[count // 2] *= OUTLIER
    yield normal, mixed
    yield with_outlier, mixed

    if outputs.is_meta:
        yield torch.rand(shape, generator=generator, dtype=torch.float64), mixed
    else:
        yield between(outputs, count, generator), mixed


def between(outputs: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return outputs, [count, ...], between those of the model, with values that the loss needs."""
    shares = torch.rand(count, len(outputs), generator=generator, dtype=torch.float64)
    shares /= shares.sum(1, keepdim=True)
    return torch.tensordot(shares, outputs.double(), dims=1)


def mixed_targets(targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return targets like these that differ from sample to sample, where some samples are alike."""
    if targets.is_complex():
        return targets * (0.5 + torch.rand(targets.shape, generator=generator, dtype=torch.float64))
    if targets.is_floating_point():
        scaled = targets * (
            0.5 + torch.rand(targets.shape, generator=generator, dtype=targets.dtype)
        )
        binary = ((targets == 0) | (targets == 1)).all(0)
        drawn = torch.randint(0, 2, targets.shape, generator=generator).to(targets.dtype)
        return torch.where(binary, drawn, scaled)

    values = targets.unique()
    if len(values) == 1:
        values = torch.stack(
            [values[0], torch.zeros_like(values[0]) if values[0] else torch.ones_like(values[0])]
        )
    if targets.dim() == 1:  # classes: two samples of each
        return values[torch.arange(len(targets)) // 2 % len(values)]
    return values[torch.randint(0, len(values), targets.shape, generator=generator)]


def opposite_targets(targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return these targets, every other pair of samples with the opposite sign, as of labels 1, -1.

    A loss may compare samples with a positive target with the others.
    """
    if not has_fraction(targets):
        return mixed_targets(targets, generator)
    opposite = torch.arange(len(targets)) // 2 % 2 == 1
    return torch.where(opposite.view(-1, *[1] * (targets.dim() - 1)), -targets, targets)


def spread_targets(targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return targets that are spread around these, more widely from sample to sample.

    Integers stay integers. A loss may compare samples with a target above a threshold with the
    others. Some class indices are too large: a loss that fails for these is not refused.
    """
    if not has_spread(targets):
        return mixed_targets(targets, generator)
    noise = torch.randn(targets.shape, generator=generator, dtype=torch.float64)
    scales = 2.0 ** (1 + torch.arange(len(targets)) % SAMPLES)
    noise *= scales.view(-1, *[1] * (targets.dim() - 1))
    if targets.is_complex():
        return targets * noise
    numbers = targets.double()
    spread = numbers + (1 + numbers.abs()) * noise
    if not targets.is_floating_point():
        # a negative one stands for a sample that does not count
        return torch.where(targets < 0, numbers, spread.abs().round()).to(targets.dtype)
    are_integers = ((numbers == numbers.round()) | numbers.isnan()).all()
    return (spread.round() if are_integers else spread).to(targets.dtype)


def has_fraction(targets: torch.Tensor) -> bool:
    """Return whether targets are real or complex numbers, and no indices."""
    return targets.is_floating_point() or targets.is_complex()


def has_spread(targets: torch.Tensor) -> bool:
    """Return whether targets may be spread.

    Of masks, F.one_hot with large indices would take much memory.
    """
    return has_fraction(targets) or (targets.dtype != torch.bool and targets.dim() == 1)


def ways_to_make_up(
    targets: torch.Tensor,
) -> list[Callable[[torch.Tensor, torch.Generator], torch.Tensor]]:
    """Return the functions that make up different targets of these."""
    ways = [mixed_targets]
    if has_fraction(targets):
        ways.append(opposite_targets)
    if has_spread(targets):
        ways.append(spread_targets)
    return ways


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
    if outputs is None and not on_meta:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        with suppress(Exception), torch.no_grad(), state_kept(model):
            outputs = call(model.eval(), to(inputs, device))
    is_batch = not isinstance(outputs, torch.Tensor) or outputs.shape[:1] == (size(inputs),)
    return outputs if is_batch else None


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
