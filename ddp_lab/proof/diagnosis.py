"""The first tensor that differs from that of one rank, and the likely cause, from numbers alone."""

from collections.abc import Mapping

from torch import Tensor

from ddp_lab.proof.numbers import constant_factor, first_difference, relative_difference
from ddp_lab.proof.report import Difference, factor_text, is_whole


def diagnose(
    expected: Mapping[str, Tensor],
    actual: Mapping[str, Tensor],
    world_size: int,
    *,
    tolerance: float | None = None,
) -> Difference | None:
    """Return the first tensor that differs and the likely cause, or None if all are equal.

    Args:
        expected: gradients or weights of one rank by name; their order is that of the report.
        actual: the same of `world_size` ranks.
        world_size: number of ranks.
        tolerance: the largest difference of an element that is rounding, as a fraction of the
            tensor's largest element; None: that of the dtype.
    """
    names = [name for name in expected if name in actual]
    wrong = first_difference(expected, actual, tolerance)
    if not wrong:
        return None
    name = wrong[0]
    if name not in actual:
        return Difference(name, None, "It is missing: no rank has returned it.", 1.0, "missing")
    factors = {each: constant_factor(expected[each], actual[each], tolerance) for each in wrong}
    factor = factors[name]
    everywhere = len(wrong) == len(names)
    where = f"all {len(names)} tensors" if everywhere else f"{len(wrong)} of {len(names)} tensors"
    relative = relative_difference(expected[name], actual[name])
    return Difference(name, factor, cause_of(factor, world_size, everywhere), relative, where)


def cause_of(factor: float | None, world_size: int, everywhere: bool) -> str:
    """Return the likely cause of a factor, a sentence."""
    if factor is None:
        return "The ratio is not constant: other samples, weights or elements were used."
    if abs(factor) < 1e-6:
        return "It is zero: nothing was added to this gradient, or it was cleared."
    if is_whole(factor / world_size) and round(factor / world_size) == 1:
        if everywhere:
            return f"{factor_text(factor)} is the number of ranks: a sum where the mean was meant."
        return (
            f"{factor_text(factor)} is the number of ranks: each rank has computed the full "
            "gradient of this replicated parameter, and they were summed."
        )
    if is_whole(factor * world_size) and round(factor * world_size) == 1:
        return f"{factor_text(factor)}: the mean over the ranks where the sum was meant."
    if is_whole(factor):
        return (
            f"{factor_text(factor)} is not the number of ranks: the means of so many micro-batches "
            "were summed and not divided by their number."
        )
    return f"All elements have the factor {factor_text(factor)}."
