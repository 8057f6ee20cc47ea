"""One rank's local batch, and its sizes."""

from typing import NamedTuple

import torch

IGNORE = -100  # F.cross_entropy's ignore_index: the target of padding


class Batch(NamedTuple):
    """One rank's local batch.

    Attributes:
        inputs: float32 [b, channels, height, width], normalised, on the rank's device.
        targets: int64 [b], IGNORE for padding; for mixed samples probabilities, [b, classes], which are all 0 for padding.
        count: samples in the GLOBAL batch, without padding: the divisor of its mean loss. Known without communication.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  # nobody calls tuple.count of a batch


class BatchSize(NamedTuple):
    """The sizes of a batch, which are known before it is read.

    Attributes:
        size: samples in this rank's local batch, padding included.
        count: samples in the GLOBAL batch, without padding.
    """

    size: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  # nobody calls tuple.count of a batch size


def classes_of(targets: torch.Tensor) -> torch.Tensor:
    """Return the class of each sample, [b]: for mixed targets, [b, classes], the most probable one. IGNORE is padding."""
    return targets if targets.dim() == 1 else torch.where(targets.any(1), targets.argmax(1), IGNORE)
