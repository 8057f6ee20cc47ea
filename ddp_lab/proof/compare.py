"""The comparison of strategies with `single`: what differs first, and whether it is rounding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.proof.diagnosis import diagnose
from ddp_lab.proof.numbers import difference_of, largest, noise_floor
from ddp_lab.proof.plans import Plan
from ddp_lab.proof.recording import OtherTensor, Recording, Tensors
from ddp_lab.proof.report import Difference, Report, Row
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
LOSS = "the loss"
FEW = 3  # names that a note lists
OF_ACCUMULATION = (
    "With accumulate=1 it is equal: between the micro-batches gradients are cleared, or not summed."
)


class Subject(Protocol):
    """A training that any strategy can do, for some steps."""

    def record(
        self, plan: Plan, dtype: torch.dtype, reverses: bool, max_grad_norm: float | None
    ) -> Recording:
        """Train with a strategy as one of its ranks, and return what its steps have computed."""
        ...


class Quantity(NamedTuple):
    """Tensors of a recording that are compared, in the order in which a step computes them.

    Attributes:
        kind: initial, gradient, clipped, loss or weight.
        step: number of the step, from 1; 0: before the first one.
        tensors: by name.
    """

    kind: str
    step: int
    tensors: Tensors


@dataclass(frozen=True)
class RunReport(Report):
    """The outcomes of a proof of a run.

    Attributes:
        notes: lines about how it was compared.
    """

    notes: Sequence[str] = field(default=())

    def __str__(self) -> str:
        return "\n".join([*self.notes, super().__str__()])

    def as_json(self) -> dict[str, Any]:
        """Return the report as of `Report`, with the notes."""
        return super().as_json() | {"notes": [*self.notes]}


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
    run: "RunFacts"


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


def compare(
    workers: Workers, reference_plan: Plan, plans: Sequence[Plan], facts: RunFacts
) -> RunReport:
    """Compare plans with the reference, and return a row for each.

    Args:
        workers: whose context is a Subject.
        reference_plan: of one device.
        plans: what is compared with it.
        facts: of the run.

    Raises:
        ConfigError: the run is refused on one device, or is not the same twice.
    """
    reference = make_reference(workers, reference_plan, facts)
    rows = [compare_plan(workers, reference, plan) for plan in plans]
    return RunReport(rows, reference.notes)


def compare_plan(workers: Workers, reference: Reference, plan: Plan) -> Row:
    """Train with a plan, and return how it compares with the reference."""
    answer = train(workers, plan, reference.dtype, False, reference.max_grad_norm)
    if answer.kind != "returned":
        return Row(plan.name, answer.kind, answer.value)
    difference = first_difference(reference, answer.value, plan)
    if difference is not None and reference.run.accumulate > 1 and plan.accumulate is None:
        undivided = replace(plan, accumulate=1)
        other = train(workers, undivided, reference.dtype, False, reference.max_grad_norm)
        alike = other.kind == "returned" and not first_difference(reference, other.value, plan)
        if alike and not reference.run.has_batch_norm:
            difference = replace(difference, cause=OF_ACCUMULATION)
    return Row(plan.name, "different" if difference else "equal", "", difference)


def train(
    workers: Workers, plan: Plan, dtype: torch.dtype, reverses: bool, max_grad_norm: float | None
) -> Answer:
    """Train with a plan on its ranks, and return the recording of rank 0, or why there is none."""
    return workers.run(plan.ranks, record, plan, dtype, reverses, max_grad_norm, activity=plan.name)


def record(subject: Subject, *arguments: Any) -> Recording:
    """Call `Subject.record`, on a rank."""
    return subject.record(*arguments)


def make_reference(workers: Workers, plan: Plan, facts: RunFacts) -> Reference:
    """Train on one device, and measure the rounding of another order of addition.

    Raises:
        ConfigError: the run is refused, or fails, or is not the same twice.
    """
    notes: list[str] = []
    max_grad_norm = facts.max_grad_norm
    dtype = PRECISE
    answer = train(workers, plan, dtype, False, max_grad_norm)
    if answer.kind != "returned":
        dtype = COARSE
        problem = answer.value
        answer = train(workers, plan, dtype, False, max_grad_norm)
        if answer.kind != "returned":
            raise ConfigError(answer.value)
        notes.append(f"computed in float32, because float64 is not possible: {problem}")
    recording: Recording = answer.value
    if recording.computes_in != dtype:
        dtype = recording.computes_in
        notes.append(f"computed in {name_of(dtype)}, the dtype of the model")

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
    return Reference(
        recording, dtype, compared, max_grad_norm, tolerance, unstable, tuple(notes), facts
    )


def few(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many others there are."""
    others = f" and {count(len(names) - FEW, 'other')}" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + others


def returned(answer: Answer) -> Recording:
    """Return the recording of an answer.

    Raises:
        ConfigError: it is none.
    """
    if answer.kind != "returned":
        raise ConfigError(answer.value)
    return answer.value


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, for example float32."""
    return str(dtype).removeprefix("torch.")


def quantities(recording: Recording) -> Iterator[Quantity]:
    """Yield what is compared, in the order in which a training computes it."""
    yield Quantity("initial", 0, recording.initial)
    for place, gradients in enumerate(recording.gradients):
        step = place + 1
        yield Quantity("gradient", step, gradients)
        yield Quantity("loss", step, {LOSS: recording.losses[place]})
        if recording.clipped:
            yield Quantity("clipped", step, recording.clipped[place])
    yield Quantity("weight", len(recording.sizes), recording.weights)


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


def first_difference(reference: Reference, recording: Recording, plan: Plan) -> Difference | None:
    """Return the first tensor that a plan computes otherwise than the reference, or None.

    Args:
        reference: of one device.
        recording: of the plan.
        plan: for the causes.
    """
    copies = recording.replicas if recording.replicas > 1 else plan.ranks
    rounded = recording.in_dtype(reference.compared)
    pairs = zip(quantities(reference.recording), quantities(rounded), strict=True)
    equal_before = list[str]()
    for expected, actual in pairs:
        tensors = {
            name: tensor
            for name, tensor in expected.tensors.items()
            if (expected.kind, name) not in reference.unstable
        }
        difference = diagnose(
            tensors, with_zeros(tensors, actual.tensors), copies, tolerance=reference.tolerance
        )
        if difference is not None:
            explained = explain(difference, expected, reference, equal_before)
            return of_replicas(explained, expected, rounded, reference)
        if expected.step == 1 and expected.kind == "gradient" and recording.other_gradient:
            return of_other_replica(recording.other_gradient, "gradient of step 1")
        equal_before.append(expected.kind)
    if recording.drifted is not None:
        return of_other_replica(recording.drifted, f"weight after step {len(recording.sizes)}")
    return None


def of_other_replica(other: OtherTensor, kind: str) -> Difference:
    """Return the difference of a tensor that is right on replica 0 only."""
    return Difference(
        other.name,
        None,
        f"On replica 0 it is right, but replica {other.replica} has another one: all replicas must "
        "have the same.",
        other.relative,
        f"{kind}, on replica {other.replica}",
    )


def of_replicas(
    difference: Difference, quantity: Quantity, recording: Recording, reference: Reference
) -> Difference:
    """Return a difference with the cause that follows from the gradients of the other replicas.

    Args:
        difference: of the tensors of `quantity`.
        quantity: what differs first.
        recording: of the plan.
        reference: of one device.
    """
    name = difference.name
    if quantity.kind != "gradient" or quantity.step > 1 or name not in recording.summed:
        return difference
    expected = {name: quantity.tensors[name]}
    if diagnose(expected, recording.summed, 1, tolerance=reference.tolerance) is not None:
        return difference
    return replace(
        difference,
        cause="The gradients of the ranks add up to the right one: the sum over the ranks is "
        "missing.",
    )


def with_zeros(expected: Tensors, actual: Tensors) -> Tensors:
    """Return the tensors with zeros in place of a missing one that is expected to be zero."""
    zeros = {
        name: torch.zeros_like(tensor)
        for name, tensor in expected.items()
        if name not in actual and not is_nonzero(tensor)
    }
    return actual | zeros


def is_nonzero(tensor: Tensor) -> bool:
    """Whether a tensor has an element other than zero."""
    return bool(tensor.count_nonzero())


def explain(
    difference: Difference, quantity: Quantity, reference: Reference, before: Sequence[str]
) -> Difference:
    """Return a difference with its step, and the cause that follows from what is equal before it.

    Args:
        difference: of the tensors of `quantity`.
        quantity: what differs first.
        reference: of one device.
        before: the kinds of quantities that are equal, in order.
    """
    sizes = reference.recording.sizes
    kind = "clipped gradient" if quantity.kind == "clipped" else quantity.kind
    where = f"{kind} of step {quantity.step}, {difference.where}"
    cause = difference.cause
    if quantity.kind == "initial":
        where = f"before the first step, {difference.where}"
        cause = "The ranks begin with other weights than single does."
    elif quantity.kind == "clipped":
        cause = (
            "The gradients are right before clipping, so they were clipped by another norm than "
            "that of the complete model, for example the norm of what one rank has."
        )
    elif quantity.kind == "weight":
        where = f"after step {quantity.step}, {difference.where}"
        cause = (
            "All gradients are right, so the optimizer's update differs: its options, its state, "
            "the learning rate, or what is not updated by it."
        )
    elif quantity.kind == "loss":
        cause = "The gradients are right, but the loss that is reported is not that of the batch."
    elif quantity.step == len(sizes) and "gradient" in before:
        cause = partial_cause(difference.factor, sizes)
        where += ", only after the full batches"
    elif quantity.step > 1 and "gradient" in before:
        cause = (
            f"The gradients of step 1 are right, so the update of step {quantity.step - 1} was not."
        )
    return replace(difference, where=where, cause=cause)


def partial_cause(factor: float | None, sizes: Sequence[int]) -> str:
    """Return the likely cause of a difference that only the partial last batch has, a sentence.

    Args:
        factor: constant factor of the gradients; None: there is none.
        sizes: samples of the batches.
    """
    full = max(sizes)
    last = sizes[-1]
    text = f"Only the partial last batch differs, {count(last, 'sample')} in place of {full}: "
    if factor is not None and abs(factor - last / full) < 1e-4:
        return f"{text}its sum was divided by the size of a full batch ({last}/{full})."
    if factor is None:
        return (
            f"{text}the ranks have unequal numbers of its samples, and each rank's mean counts the "
            "same, or padding counts."
        )
    return f"{text}its divisor is not the number of its samples."
