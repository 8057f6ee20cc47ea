"""Causes that a constant factor between the tensors of one rank and of several shows."""

from typing import NamedTuple

from ddp_lab.proof.evidence import Case, step_of
from ddp_lab.proof.report import factor_text, is_whole


class Cause(NamedTuple):
    """A likely cause.

    Attributes:
        factor: the constant factor of the tensor, if it has one.
        text: the cause, a sentence or two.
    """

    factor: float | None
    text: str


def by_factor(case: Case) -> Cause | None:
    """Explain a tensor that is a constant times the expected one, on all ranks."""
    if not case.agree:
        return None
    factor = case.factor(case.reference, case.values()[0])
    if factor is None:
        return None
    others = [case.factor(case.expected[name], case.values(name)[0]) for name in case.wrong_of_step]
    is_common = all(other is not None and close(other, factor) for other in others)
    if case.is_update:
        return of_update(case, factor, is_common)
    if abs(factor) < 1e-6:
        text = "It is zero: nothing was added to it, or it was cleared before it was read."
        return Cause(0.0, text)
    if is_common:
        return Cause(factor, of_gradient(case, factor))
    norms = {
        float(f"{case.values(name)[0].double().norm():.3e}")
        for name in case.wrong_of_step
        if case.expected[name].numel() > 1
    }
    if len(norms) == 1 and len(others) > 2:
        text = "The tensors that differ have equal norms: each was clipped by its own norm."
        return Cause(factor, f"{text} Clip by the norm of all gradients together.")
    text = f"{case.name} has the factor {factor_text(factor)}, but other tensors have others."
    return Cause(factor, f"{text} Look for a scale that belongs to this tensor alone.")


def of_gradient(case: Case, factor: float) -> str:
    """Return the likely cause of a factor that all tensors that differ have."""
    ranks = case.world_size
    text = factor_text(factor)
    if close(factor, -1):
        return "The sign is reversed: a loss was negated, or the gradient is added twice too often."
    same = [
        size
        for size, other in case.evidence.other_factors.items()
        if size != ranks and other is not None and close(other, factor)
    ]
    is_multiple = is_whole(factor) or is_whole(1 / factor)
    if is_multiple and (same or not (close(factor, ranks) or close(factor * ranks, 1))):
        if same:
            why = f"{text} on {same[0]} and on {ranks} ranks, so it is not the number of ranks"
        else:
            why = f"{text} is not the number of ranks, {ranks}"
        if is_whole(factor):
            return (
                f"{why}: the loss is multiplied by the number of micro-batches. Their means are "
                "summed: divide the loss of each by their number, once."
            )
        return (
            f"{why}: the loss is divided by the number of micro-batches once too often, or all of "
            "them but one are lost."
        )
    if close(factor, ranks):
        if case.is_everywhere:
            return (
                f"{text} is the number of ranks: a sum over the ranks where the mean was meant. "
                "Divide by the number of ranks, or the loss of each rank by the size of the global "
                "batch."
            )
        return (
            f"{text} is the number of ranks, and the other tensors are right: each rank has the "
            "complete gradient of this replicated parameter, and the ranks' copies were summed. "
            "Sum only gradients that are partial."
        )
    if close(factor * ranks, 1):
        if case.is_everywhere:
            return (
                f"{text} is one over the number of ranks: the mean over the ranks where the sum "
                "was meant. The loss of each rank is already divided by the size of the global "
                "batch; or the value of one rank is divided by the number of ranks."
            )
        return (
            f"{text} is one over the number of ranks, and the other tensors are right: this "
            "gradient exists on one rank only and was averaged over all, or its sum is missing."
        )
    if case.is_everywhere:
        return (
            f"All gradients have the factor {text}: the loss is scaled, its divisor is another "
            "number of samples, or they were clipped by another norm."
        )
    return f"Only these tensors have the factor {text}: look for a scale that they alone have."


def of_update(case: Case, factor: float, is_common: bool) -> Cause | None:
    """Return the likely cause of a factor of the change of the weights in a step."""
    step = case.step
    if step is None or not is_common:
        return None
    text = f"The weights change by {factor_text(factor)} the expected amount in step {step}"
    earlier = [name for name in case.expected if is_earlier(name, case)]
    if earlier:
        return Cause(
            factor,
            f"{text}, and the earlier steps are right: the learning rate differs from there on. "
            "A schedule is stepped another number of times, for example once for every rank in "
            "place of once for every step.",
        )
    if close(factor, case.world_size):
        why = (
            "the number of ranks. The learning rate is multiplied by it, or the gradients are "
            "summed where the mean was meant"
        )
        return Cause(factor, f"{text}, {why}.")
    if close(factor * case.world_size, 1):
        why = "one over the number of ranks. The gradients are averaged where the sum was meant"
        return Cause(factor, f"{text}, {why}.")
    return Cause(factor, f"{text}: another learning rate, or a scaled gradient.")


def is_earlier(name: str, case: Case) -> bool:
    """Whether a name belongs to a step before that of the tensor; step 0 is before training."""
    step = step_of(name)
    return step is not None and case.step is not None and 1 <= step < case.step


def close(one: float, other: float) -> bool:
    """Whether two factors are the same but for rounding."""
    return abs(one - other) <= 1e-4 * max(abs(one), abs(other))
