"""The comparison of strategies with `single`: a row for each.

Its parts have a file each:

    reference.py         the training of `single`, and how much of it is rounding
    first_difference.py  what differs from it first, and why
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_lab.proof.first_difference import first_difference
from ddp_lab.proof.plans import Plan
from ddp_lab.proof.reference import Reference, RunFacts, make_reference, train
from ddp_lab.proof.report import Report, Row
from ddp_lab.proof.workers import Workers

OF_ACCUMULATION = (
    "With accumulate=1 it is equal: between the micro-batches gradients are cleared, or not summed."
)


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
