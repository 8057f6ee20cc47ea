"""Causes of values that differ between the ranks."""

import torch

from ddp_lab.proof.batches import rows_text
from ddp_lab.proof.causes_factor import Cause
from ddp_lab.proof.causes_samples import counted
from ddp_lab.proof.evidence import Case

MISSING = "the all-reduce is missing"


def by_ranks(case: Case) -> Cause | None:
    """Explain a tensor that the ranks have different values of."""
    if case.agree:
        return None
    values = case.values()
    stacked = torch.stack([value.detach().double() for value in values])
    reference = case.reference.double()
    if case.equal(reference, stacked.sum(0)):
        return Cause(None, of_missing_sum(case))
    drawn = by_drawing(case)
    if drawn:
        return drawn
    if case.equal(reference, stacked.mean(0)):
        return Cause(None, of_missing_mean(case))
    partly = by_own_samples(case)
    if partly:
        return Cause(None, partly)
    factors = [case.factor(case.reference, value) for value in values]
    if all(factor is not None for factor in factors):
        texts = ", ".join(f"{factor:.3g}" for factor in factors if factor is not None)
        return Cause(
            None,
            f"Each rank has its own factor ({texts}): a scale is computed from the rank's own "
            "values, such as a norm, a number of samples, or a learning rate.",
        )
    text = "The ranks have different values, though each should hold the same"
    return Cause(None, f"{text}: {MISSING}, or an update is made on some ranks only.")


def of_missing_sum(case: Case) -> str:
    """Return the cause if the values of the ranks add up to the expected one."""
    text = "The ranks hold different values whose sum is the expected one: a sum is missing"
    if case.is_everywhere:
        return f"{text}. All-reduce the gradients after the backward pass."
    return (
        f"{text}, and the other tensors are right. This parameter is used on several ranks, and "
        "each has only the gradient of its own use: tied weights on two stages of a pipeline, or a "
        "parameter below a sharded layer. Sum its gradients over those ranks."
    )


def of_missing_mean(case: Case) -> str:
    """Return the cause if the mean of the values of the ranks is the expected one."""
    text = "The ranks hold different values whose mean is the expected one"
    names = case.wrong_of_step
    for parts in case.evidence.parts.values():
        alone = [
            case.all_equal(part.tensors, tensors, [name for name in names if name in tensors])
            for part, tensors in zip(parts, case.evidence.ranks, strict=True)
        ]
        if all(alone):
            return f"{text}, and each is that of the rank's own samples: {MISSING}."
    partly = by_own_samples(case)
    return partly or (
        f"{text}. {MISSING[0].upper()}{MISSING[1:]}, at least for a part of the samples, such as "
        "those of the last accumulation step."
    )


def by_own_samples(case: Case) -> str | None:
    """Explain values that contain samples of their own rank alone."""
    times = [counted(case, tensors) for tensors in case.evidence.ranks]
    counts = [each for each in times if each is not None]
    if len(counts) < len(times) or not counts:
        return None
    blocks = case.evidence.blocks
    common = [
        row
        for number, block in enumerate(blocks)
        if all(each[number] for each in counts)
        for row in block.rows
    ]
    lacking = {
        rank: [row for number, block in enumerate(blocks) if not each[number] for row in block.rows]
        for rank, each in enumerate(counts)
    }
    missing = [rank for rank, rows in lacking.items() if rows]
    if not missing:
        return None
    rank = missing[0]
    if not common:
        return f"Each rank's value contains its own samples only: {MISSING}."
    return (
        f"The value of rank {rank} does not contain {rows_text(lacking[rank])}, which other ranks "
        f"have. {rows_text(common).capitalize()} were summed over the ranks: the all-reduce is "
        "missing in some accumulation steps, such as the last."
    )


def by_drawing(case: Case) -> Cause | None:
    """Explain values of which one is that of one rank, and the others are not."""
    values = case.values()
    right = [case.equal(case.reference, value) for value in values]
    results = [part.tensors for parts in case.evidence.parts.values() for part in parts]
    results += [block.tensors for block in case.evidence.blocks]
    known = [tensors[case.name] for tensors in results if case.name in tensors]
    depends_on_samples = not known or any(not case.equal(case.reference, one) for one in known)
    if depends_on_samples and not any(right):
        return None
    wrong = [value for value, is_right in zip(values, right, strict=True) if not is_right]
    first = wrong[0]
    if any(right) and len(wrong) > 1 and all(case.equal(first, value) for value in wrong):
        text = f"Rank {right.index(True)} has the expected value and all others have another"
        return Cause(None, f"{text}: it is loaded or updated on one rank only. Broadcast it.")
    if any(right) and has_own_samples(case):
        return Cause(
            None,
            f"Rank {right.index(True)} has the expected value, and the other ranks those of their "
            "own samples: the gradients are summed on one rank (reduce). Use all_reduce.",
        )
    if not depends_on_samples:
        text = "The value does not depend on the samples, and yet each rank has its own"
    else:
        text = f"Rank {right.index(True)} has the expected value, and each other rank its own"
    return Cause(
        None,
        f"{text}: it is drawn on each rank, as the initial value of an adapter or a layer that is "
        "added later, or updated on one rank only. Draw it from the same seed, or broadcast it "
        "from rank 0.",
    )


def has_own_samples(case: Case) -> bool:
    """Whether ranks with a wrong value have that of their own samples, or a multiple of it."""
    values = list(enumerate(case.values()))
    wrong = [pair for pair in values if not case.equal(case.reference, pair[1])]
    for parts in case.evidence.parts.values():
        if len(parts) == len(values) and all(
            case.name in parts[rank].tensors
            and case.factor(parts[rank].tensors[case.name], value) is not None
            for rank, value in wrong
        ):
            return True
    return False
