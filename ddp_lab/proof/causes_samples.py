"""Causes that show in how often a gradient contains each sample."""

from collections.abc import Sequence

import torch

from ddp_lab.proof.batches import rows_text
from ddp_lab.proof.causes_factor import Cause, close
from ddp_lab.proof.evidence import Case, Part, Tensors, coefficients, merge
from ddp_lab.proof.numbers import tolerance_of

ROUNDED = 1e-3  # of a coefficient


def by_parts(case: Case) -> Cause | None:
    """Explain a tensor that consists of what the ranks compute for their parts of the batch."""
    if not case.agree:
        return None
    names = case.wrong_of_step
    merged = case.merged
    for parts in case.evidence.parts.values():
        for rank, part in enumerate(parts):
            if case.all_equal(part.tensors, merged, names):
                return Cause(None, of_one_rank(case, rank, len(parts)))
        if any(name not in part.tensors for part in parts for name in names):
            continue
        stacked = {
            name: torch.stack([part.tensors[name].double() for part in parts]) for name in names
        }
        means = {name: tensor.mean(0) for name, tensor in stacked.items()}
        sums = {name: tensor.sum(0) for name, tensor in stacked.items()}
        if case.all_equal(means, merged, names):
            return Cause(None, of_means(case, parts, "mean"))
        if case.all_equal(sums, merged, names):
            return Cause(None, of_means(case, parts, "sum"))
    return None


def of_one_rank(case: Case, rank: int, ranks: int) -> str:
    """Return the cause if the value is what one rank's samples give."""
    last = " (the last)" if rank == ranks - 1 else ""
    if case.is_everywhere:
        return (
            f"The value is that of rank {rank}'s samples alone{last}: the other ranks' gradients "
            "are lost. All-reduce them; a broadcast is no sum."
        )
    return (
        f"The value is what rank {rank}'s samples alone give{last}: a buffer such as BatchNorm's "
        "running statistics is kept from one rank. Average it over the ranks, or compute it from "
        "the global batch."
    )


def of_means(case: Case, parts: Sequence[Part], how: str) -> str:
    """Return the cause if the value is the mean or the sum of what the parts give."""
    norm = total_norm(case, case.expected)
    norms = [total_norm(case, part.tensors) for part in parts]
    largest = max(*norms, norm)
    clipped = [each for each in [*norms, norm] if abs(each - largest) <= 1e-4 * largest]
    if len(clipped) > 1:
        return (
            f"The value is the {how} of gradients of the ranks, of which {len(clipped)} have the "
            f"same norm, {largest:.3g}: each rank clips by the norm of its local gradient, before "
            "the sum over the ranks. Clip once, after it."
        )
    return (
        f"The value is the {how} over the ranks of the mean of each rank's own samples, which "
        "have different numbers of samples or tokens, or different weights: a mean of means. "
        "Divide the sums of all ranks by the sum of the weights of all ranks."
    )


def total_norm(case: Case, tensors: Tensors) -> float:
    """Return the norm of all gradients of the step together."""
    names = [name for name in case.of_step(tensors) if tensors[name].is_floating_point()]
    return float(torch.stack([tensors[name].double().norm() for name in names]).norm())


def counted(case: Case, tensors: Tensors) -> list[float] | None:
    """Return how often each block of the batch counts, 1 if as often as on one rank.

    Returns:
        None if that cannot be computed from the evidence.
    """
    blocks = case.evidence.blocks
    names = [name for name in case.wrong_of_step if name in tensors]
    tolerance = case.tolerance or tolerance_of(case.reference)
    expected = coefficients(blocks, case.expected, names, tolerance)
    actual = coefficients(blocks, tensors, names, tolerance)
    if expected is None or actual is None or min(map(abs, expected)) < ROUNDED / len(blocks):
        return None
    times = [one / other for one, other in zip(actual, expected, strict=True)]
    return [0.0 if abs(each) < ROUNDED else each for each in times]


def by_samples(case: Case) -> Cause | None:
    """Explain a tensor by how often it contains each sample."""
    if not case.agree:
        return None
    times = counted(case, merge(case.evidence.ranks))
    if times is None:
        return None
    blocks = case.evidence.blocks
    missing = [
        row for block, each in zip(blocks, times, strict=True) if not each for row in block.rows
    ]
    present = sorted(row for block in blocks for row in block.rows if row not in missing)
    if missing and present:
        return Cause(None, of_missing(case, missing, present))
    repeated = repeated_rows(case, times)
    is_padding = len(repeated) == -len(present) % case.world_size
    if repeated and is_padding:
        return Cause(
            None,
            f"{counts_text(repeated)} twice: the partial last batch is filled up with so many "
            "repeated samples that the ranks have equally many, and they count in the mean. Give "
            "padding the weight 0, and divide by the number of real samples.",
        )
    texts = ", ".join(f"{each:.3g}" for each in times)
    for parts in case.evidence.parts.values():
        if all(len({round(times[n], 3) for n in numbers_of(case, part)}) <= 1 for part in parts):
            return Cause(
                None,
                f"All samples of a rank have the same weight, but those of different ranks have "
                f"not (for each row of the batch, 1 is right: {texts}): each rank scales by a "
                "number of its own, such as its count of samples or its local norm.",
            )
    if repeated:
        return Cause(
            None,
            f"{counts_text(repeated)} more than once: padding counts in the mean, or a sampler "
            "gives the same samples to several ranks.",
        )
    return Cause(None, f"The samples have other weights than on one rank (1 is right): {texts}.")


def counts_text(rows: list[int]) -> str:
    """Return the beginning of a sentence about rows that count too often."""
    return f"{rows_text(rows).capitalize()} {'counts' if len(rows) == 1 else 'count'}"


def repeated_rows(case: Case, times: list[float]) -> list[int]:
    """Return the rows that count equally often, a multiple of what all others count."""
    usual = torch.tensor(times).median().item()
    pairs = [(block, one / usual) for block, one in zip(case.evidence.blocks, times, strict=True)]
    more = [(block, ratio) for block, ratio in pairs if not close(ratio, 1)]
    multiples = {round(ratio) for _, ratio in more}
    is_whole = all(close(ratio, round(ratio)) and ratio > 1 for _, ratio in more)
    if len(multiples) != 1 or not is_whole:
        return []
    return [row for block, _ in more for row in block.rows]


def numbers_of(case: Case, part: Part) -> list[int]:
    """Return the numbers of the blocks that lie in a part of the batch."""
    return [
        number
        for number, block in enumerate(case.evidence.blocks)
        if set(block.rows) <= set(part.rows)
    ]


def of_missing(case: Case, missing: list[int], present: list[int]) -> str:
    """Return the cause if samples are missing on all ranks."""
    text = f"{rows_text(missing).capitalize()} of the batch do not count"
    for parts in case.evidence.parts.values():
        whole = [rank for rank, part in enumerate(parts) if set(part.rows) <= set(present)]
        absent = [rank for rank, part in enumerate(parts) if not set(part.rows) & set(present)]
        if len(whole) + len(absent) == len(parts) and absent:
            ranks = ", ".join(map(str, absent))
            return f"{text}: the gradients of rank {ranks} are lost."
        if all(is_tail(part, present) for part in parts):
            return (
                f"{text}, but the last samples of each rank do: the gradients of earlier "
                "micro-batches are cleared. Call zero_grad once before the first micro-batch, not "
                "between them."
            )
    return f"{text}: no rank has used these samples."


def is_tail(part: Part, present: list[int]) -> bool:
    """Whether the rows of a part that are present are its last ones, and not all of them."""
    used = [row in present for row in part.rows]
    return True in used and False in used and used == sorted(used)
