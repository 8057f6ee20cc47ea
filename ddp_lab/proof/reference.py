"""The training on one device with which strategies are compared, and how much of it is rounding.

It is trained a second time with another order of addition. By how much that changes it is what
counts as rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.proof.numbers import difference_of, largest, noise_floor
from ddp_lab.proof.plans import Plan
from ddp_lab.proof.quantities import quantities
from ddp_lab.proof.recording import Recording
from ddp_lab.proof.workers import Answer, Workers

PRECISE = torch.float64
COARSE = torch.float32
# the least relative difference of an element that counts, by the dtype of the computation
LEAST = {PRECISE: 1e-9, COARSE: 1e-5}
# Rounding in another order is a sample: other orders may round several times as much.
MARGIN = 16
# A model of float64 that rounds more than this computes some of its layers in float32, as
# normalisation layers of transformers do.
INSIDE = 1e-11
# Rounding of one tensor above which nothing can be concluded from it; above this for all tensors
# the training is not the same twice.
NOISE = 1e-2
FEW = 3  # names that a note lists


class Subject(Protocol):
    """A training that any strategy can do, for some steps."""

    def record(
        self, plan: Plan, dtype: torch.dtype, reverses: bool, max_grad_norm: float | None
    ) -> Recording:
        """Train with a strategy as one of its ranks, and return what its steps have computed."""
        ...


@dataclass(frozen=True)
class RunFacts:
    """What a comparison must know of a run.

    Attributes:
        max_grad_norm: largest norm of the gradients; None: they are not clipped.
        accumulate: number of gradient-accumulation steps.
        has_batch_norm: whether what is computed depends on the micro-batches.
    """

    max_grad_norm: float | None = None
    accumulate: int = 1
    has_batch_norm: bool = False


@dataclass(frozen=True)
class Reference:
    """What `single` has computed, and how much of it is rounding.

    Attributes:
        recording: of `single`.
        dtype: of the computation.
        compared: in which tensors are compared: float32 where a model of float64 rounds so inside.
        max_grad_norm: largest norm of the gradients; None: they are not clipped.
        tolerance: the largest relative difference of an element that is rounding.
        unstable: (kind, name) of the tensors of which rounding leaves nothing to compare.
        notes: lines about how it is compared.
        run: what the run is like, for the causes.
    """

    recording: Recording
    dtype: torch.dtype
    compared: torch.dtype
    max_grad_norm: float | None
    tolerance: float
    unstable: frozenset[tuple[str, str]]
    notes: tuple[str, ...]
    run: RunFacts


def make_reference(workers: Workers, plan: Plan, facts: RunFacts) -> Reference:
    """Train on one device, and measure the rounding of another order of addition.

    Raises:
        ConfigError: the run is refused, or fails, or is not the same twice.
    """
    max_grad_norm = facts.max_grad_norm
    recording, dtype, notes = in_possible_dtype(workers, plan, max_grad_norm)
    if max_grad_norm is not None and max_grad_norm > min(recording.norms) / 2:
        max_grad_norm = min(recording.norms) / 2
        notes.append(
            f"max_grad_norm={max_grad_norm:.3g} in place of the run's, which would clip nothing"
        )
        recording = returned(train(workers, plan, dtype, False, max_grad_norm))
    other = returned(train(workers, plan, dtype, True, max_grad_norm))

    compared = dtype
    if dtype == PRECISE and rounding_of(recording, other)[0] > INSIDE:
        compared = COARSE
        recording = recording.in_dtype(COARSE)
        other = other.in_dtype(COARSE)
        notes.append("compared in float32, in which some layers of the model compute")
    rounding, unstable = rounding_of(recording, other)
    if rounding > NOISE:
        raise ConfigError(
            "verify: the gradients of single change by "
            f"{rounding:.1g} of their size if the samples of a batch change places, so that no "
            "strategy can be compared with it. The model or the loss draws random numbers, or "
            "depends on the order of the samples. Use an option of the model without that"
        )
    tolerance = max(LEAST.get(compared, LEAST[COARSE]), MARGIN * rounding)
    where = f", where another order of addition differs by {rounding:.0e}" if rounding else ""
    notes.insert(
        0,
        f"{len(recording.sizes)} steps of {', '.join(map(str, recording.sizes))} samples in "
        f"{name_of(dtype)} on the CPU; equal: to {tolerance:.0e} of a tensor's largest "
        f"element{where}",
    )
    notes += notes_on_comparison(recording, facts, unstable)
    return Reference(
        recording=recording,
        dtype=dtype,
        compared=compared,
        max_grad_norm=max_grad_norm,
        tolerance=tolerance,
        unstable=unstable,
        notes=tuple(notes),
        run=facts,
    )


def in_possible_dtype(
    workers: Workers, plan: Plan, max_grad_norm: float | None
) -> tuple[Recording, torch.dtype, list[str]]:
    """Train on one device in float64 or, if that is not possible, in float32.

    Returns:
        The recording, the dtype in which the model has computed, and notes about it.

    Raises:
        ConfigError: the training fails in either.
    """
    notes: list[str] = []
    dtype = PRECISE
    answer = train(workers, plan, dtype, False, max_grad_norm)
    if answer.kind != "returned":
        notes.append(f"computed in float32, because float64 is not possible: {answer.value}")
        dtype = COARSE
        answer = train(workers, plan, dtype, False, max_grad_norm)
    recording = returned(answer)
    if recording.computes_in != dtype:
        dtype = recording.computes_in
        notes.append(f"computed in {name_of(dtype)}, the dtype of the model")
    return recording, dtype, notes


def notes_on_comparison(
    recording: Recording, facts: RunFacts, unstable: frozenset[tuple[str, str]]
) -> list[str]:
    """Return notes on what of the run is not compared, or is computed otherwise for it."""
    notes: list[str] = []
    if recording.dropout:
        notes.append(f"without dropout, which ranks draw by themselves: {few(recording.dropout)}")
    if facts.has_batch_norm:
        notes.append(
            "BatchNorm: with strategy.batch_norm=sync and one micro-batch in a pipeline, because "
            "local statistics are another computation than that of one device"
        )
    if unstable:
        names = sorted({name for _, name in unstable})
        notes.append(f"not compared, because rounding alone decides them: {few(names)}")
    return notes


def rounding_of(one: Recording, other: Recording) -> tuple[float, frozenset[tuple[str, str]]]:
    """Return the largest relative difference of two trainings that differ by rounding only.

    Returns:
        The difference, without that of unstable tensors; and the (kind, name) of these, for example
        of weights that an optimizer has divided by their own rounding.
    """
    by_tensor = dict[tuple[str, str], float]()
    for first, second in zip(quantities(one), quantities(other), strict=True):
        floor = noise_floor(first.tensors.values())
        for name, tensor in first.tensors.items():
            gap = max(0.0, difference_of(tensor, second.tensors[name]) - floor)
            key = (first.kind, name)
            relative = gap / (largest(tensor) or 1.0)
            by_tensor[key] = max(by_tensor.get(key, 0.0), relative)
    unstable = frozenset(key for key, relative in by_tensor.items() if relative > NOISE)
    if 2 * len(unstable) > len(by_tensor):
        return max(by_tensor.values()), unstable
    return max(value for key, value in by_tensor.items() if key not in unstable), unstable


def train(
    workers: Workers, plan: Plan, dtype: torch.dtype, reverses: bool, max_grad_norm: float | None
) -> Answer:
    """Train with a plan on its ranks, and return the recording of rank 0, or why there is none."""
    return workers.run(plan.ranks, record, plan, dtype, reverses, max_grad_norm, activity=plan.name)


def record(subject: Subject, *arguments: Any) -> Recording:
    """Call `Subject.record`, on a rank."""
    return subject.record(*arguments)


def returned(answer: Answer) -> Recording:
    """Return the recording of an answer.

    Raises:
        ConfigError: it is none.
    """
    if answer.kind != "returned":
        raise ConfigError(answer.value)
    return answer.value


def few(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many others there are."""
    others = f" and {count(len(names) - FEW, 'other')}" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + others


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, for example float32."""
    return str(dtype).removeprefix("torch.")
