"""When two tensors count as equal, and the constant between them."""

from collections.abc import Iterable

import torch
from torch import Tensor

# The largest rounding of a gradient, as a fraction of its largest element: sums of some thousand
# terms in another order.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
COARSE = 3e-2  # of half precision
# A gradient that is mathematically zero, such as that of a key's bias, is the rounding of the
# others: so many units of the last place of the largest tensor, but no more than a tenth of what is
# allowed of the tensor itself.
ROUNDING = 64
LARGEST_SHARE = 0.1


def tolerance_of(tensor: Tensor) -> float:
    """Return the relative rounding that is allowed for a tensor of this dtype."""
    return TOLERANCE.get(tensor.dtype, COARSE if tensor.is_floating_point() else 0.0)


def largest(tensor: Tensor) -> float:
    """Return the largest absolute element; 0 of an empty tensor."""
    return float(tensor.detach().double().abs().max()) if tensor.numel() else 0.0


def noise_floor(tensors: Iterable[Tensor]) -> float:
    """Return the absolute difference that is only the rounding of the largest of the tensors."""
    sizes = [
        largest(tensor)
        * min(ROUNDING * torch.finfo(tensor.dtype).eps, LARGEST_SHARE * tolerance_of(tensor))
        for tensor in tensors
        if tensor.is_floating_point()
    ]
    return max((size for size in sizes if size < float("inf")), default=0.0)


def relative_difference(expected: Tensor, actual: Tensor) -> float:
    """Return the largest difference of an element, divided by the largest expected element.

    Tensors of different shapes, and elements that are finite in only one, are infinitely far away.
    """
    if expected.shape != actual.shape:
        return float("inf")
    difference = difference_of(expected, actual)
    scale = largest(expected)
    if difference == 0:
        return 0.0
    return difference / scale if scale else float("inf")


def difference_of(expected: Tensor, actual: Tensor) -> float:
    """Return the largest difference of an element; inf if one is finite in only one tensor."""
    one = expected.detach().double()
    other = actual.detach().double()
    same = (one == other) | (one.isnan() & other.isnan())
    gaps = torch.where(same, 0.0, (one - other).abs())
    gap = largest(gaps)
    return float("inf") if gap != gap else gap


def is_equal(
    expected: Tensor, actual: Tensor, tolerance: float | None = None, floor: float = 0.0
) -> bool:
    """Whether two tensors differ by rounding at most.

    Args:
        expected: the reference.
        actual: of any shape.
        tolerance: the allowed difference relative to the largest element; None: that of the dtype.
        floor: the absolute difference that is allowed in addition.
    """
    if expected.shape != actual.shape:
        return False
    allowed = tolerance_of(expected) if tolerance is None else tolerance
    scale = largest(expected)
    if scale == float("inf") or scale != scale:
        return difference_of(expected, actual) == 0
    return difference_of(expected, actual) <= allowed * scale + floor


def constant_factor(
    expected: Tensor, actual: Tensor, tolerance: float | None = None, floor: float = 0.0
) -> float | None:
    """Return c if `actual` is c times `expected` in every element; otherwise None."""
    if expected.shape != actual.shape:
        return None
    one = expected.detach().double().flatten()
    other = actual.detach().double().flatten()
    square = float(one @ one)
    if square == 0 or not bool(other.isfinite().all()) or square == float("inf"):
        return None
    factor = float(one @ other) / square
    allowed = tolerance_of(expected) if tolerance is None else tolerance
    scale = max(largest(one) * abs(factor), largest(one))
    return factor if difference_of(one * factor, other) <= allowed * scale + floor else None
