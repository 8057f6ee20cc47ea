"""What a strategy computes otherwise than one device first, and the cause that follows from it.

What is equal before it excludes causes: a clipped gradient that differs after an equal gradient
is an error of clipping, and a weight after equal gradients one of the optimizer's update.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ddp_lab.config.errors import count
from ddp_lab.proof.diagnosis import diagnose
from ddp_lab.proof.plans import Plan
from ddp_lab.proof.quantities import Quantity, quantities
from ddp_lab.proof.recording import OtherTensor, Recording, Tensors
from ddp_lab.proof.reference import Reference
from ddp_lab.proof.report import Difference


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
