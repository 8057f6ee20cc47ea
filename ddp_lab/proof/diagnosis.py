"""The first tensor that differs from that of one rank, and the likely cause, from numbers alone.

A hypothesis is a function of the case that returns a cause if the numbers confirm it. The specific
ones come first: the ranks disagree, a step repeats the one before, all elements have one factor,
shards have factors, an average is too near, the parts of the ranks are put together wrongly, some
samples count too often or not at all. Where values confirm none, the changes of the step are tried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ddp_lab.proof.causes_factor import Cause, by_factor
from ddp_lab.proof.causes_ranks import by_ranks
from ddp_lab.proof.causes_samples import by_parts, by_samples
from ddp_lab.proof.causes_shards import by_shards
from ddp_lab.proof.causes_steps import by_average, by_repetition, updates
from ddp_lab.proof.evidence import Case, Evidence, merge, step_of
from ddp_lab.proof.numbers import is_equal, noise_floor, relative_difference
from ddp_lab.proof.report import Difference

HYPOTHESES = (
    by_repetition,
    by_ranks,
    by_factor,
    by_shards,
    by_average,
    by_parts,
    by_samples,
)


def diagnose(
    expected: Mapping[str, Tensor],
    actual: Mapping[str, Tensor],
    world_size: int,
    *,
    tolerance: float | None = None,
    evidence: Evidence | None = None,
) -> Difference | None:
    """Return the first tensor that differs and the likely cause, or None if all are equal.

    Args:
        expected: gradients or weights of one rank by name; their order is that of the report. A
            name such as "step 2/weight" belongs to a step; step 0 is before the first.
        actual: the same of `world_size` ranks.
        world_size: number of ranks.
        tolerance: the largest difference of an element that is rounding, as a fraction of the
            tensor's largest element; None: that of the dtype.
        evidence: what is known beside; None: nothing.
    """
    known = evidence or Evidence()
    if not known.ranks:
        known = replace(known, ranks=[actual])
    floor = noise_floor(expected.values())
    wrong = [
        name
        for name, tensor in expected.items()
        if is_wrong(name, tensor, known.ranks, tolerance, floor)
    ]
    if not wrong:
        return None
    name = wrong[0]
    case = Case(
        name=name,
        wrong=wrong,
        expected=expected,
        evidence=known,
        world_size=world_size,
        tolerance=tolerance,
        floor=floor,
    )
    cause = by_form(case) or by_hypotheses(case)
    return Difference(name, cause.factor, cause.text, farthest(case), where(case))


def is_wrong(
    name: str,
    tensor: Tensor,
    ranks: Sequence[Mapping[str, Tensor]],
    tolerance: float | None,
    floor: float,
) -> bool:
    """Whether a tensor is missing on all ranks, or differs on one that has it."""
    values = [tensors[name] for tensors in ranks if name in tensors]
    return not values or any(not is_equal(tensor, value, tolerance, floor) for value in values)


def by_form(case: Case) -> Cause | None:
    """Explain a tensor that is missing, not finite or of another shape."""
    values = case.values()
    if not values:
        return Cause(None, "No rank returns it: it is not gathered, or it has no gradient.")
    shape = list(case.reference.shape)
    other = next((value for value in values if value.shape != case.reference.shape), None)
    if other is not None:
        text = f"Its shape is {list(other.shape)}, expected {shape}"
        if other.numel() * case.world_size == case.reference.numel():
            return Cause(None, f"{text}: it is the shard of one rank. Gather the complete tensor.")
        return Cause(None, f"{text}.")
    if not all(bool(value.isfinite().all()) for value in values):
        return Cause(None, "It is not finite: a mean over no samples, or an overflow.")
    if not case.reference.is_floating_point():
        return Cause(None, "Integers differ: other samples, or another number of steps.")
    return None


def by_hypotheses(case: Case) -> Cause:
    """Return the first cause that the numbers confirm, or what is known of an unknown one."""
    views = [case, updates(case)]
    for view in views:
        for hypothesis in HYPOTHESES if view else ():
            cause = hypothesis(view) if view else None
            if cause:
                return cause
    if case.step is not None and any((step_of(name) or 0) < case.step for name in case.expected):
        return Cause(
            None,
            f"All tensors before step {case.step} are right. What changes from step to step "
            "differs: the order of the samples, a schedule, an average, or the optimizer's state.",
        )
    return Cause(
        None,
        "No constant ratio, and no sum of the ranks' parts, explains it: other samples, other "
        "initial weights, or a computation that depends on the rank or on the other samples of its "
        "batch, such as a mean over the batch.",
    )


def farthest(case: Case) -> float:
    """Return the largest relative difference of any rank's value."""
    values = case.values()
    return max((relative_difference(case.reference, value) for value in values), default=1.0)


def where(case: Case) -> str:
    """Return which tensors, ranks and steps differ."""
    names = case.of_step(case.expected)
    wrong = case.of_step(case.wrong)
    count = f"all {len(names)}" if len(wrong) == len(names) else f"{len(wrong)} of {len(names)}"
    parts = [f"{count} tensors" if len(names) > 1 else "the only tensor"]
    values = case.values()
    differ = [
        str(rank)
        for rank, tensors in enumerate(case.evidence.ranks)
        if case.name in tensors and not case.equal(case.reference, tensors[case.name])
    ]
    if len(differ) < len(values):
        noun = "rank" if len(differ) == 1 else "ranks"
        parts.append(f"on {noun} {', '.join(differ)} only")
    elif len(values) > 1 and not all_same_shape(values):
        parts.append("in different shapes")
    elif len(values) > 1 and not case.agree:
        parts.append("different on each rank")
    if case.step is not None and case.step > 1:
        parts.append(f"from step {case.step} on")
    return ", ".join(parts)


def all_same_shape(values: Sequence[Tensor]) -> bool:
    """Whether tensors have one shape."""
    return len({value.shape for value in values}) == 1


__all__ = ["Evidence", "diagnose", "merge"]
