"""One rank's local batch, and its sizes."""

from typing import NamedTuple

import torch

IGNORE = -100  # F.cross_entropy's ignore_index: the target of padding


class Batch(NamedTuple):
    """One rank's local batch.

    Attributes:
        inputs: float32 [b, channels, height, width], normalised, on the rank's device.
        targets: int64 [b], IGNORE for padding.
        count: samples in the GLOBAL batch, without padding: the divisor of its mean loss. Known without communication.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  # nobody calls tuple.count of a batch


class Turn(NamedTuple):
    """The sizes of a batch that is not gathered yet (`DeviceLoader.take` gathers it on the device).

    Attributes:
        size: samples in this rank's local batch, padding included.
        count: samples in the GLOBAL batch, without padding.
    """

    size: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  # nobody calls tuple.count of a turn
