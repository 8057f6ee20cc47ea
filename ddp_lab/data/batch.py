"""One rank's local batch, and its sizes."""

from typing import NamedTuple

import torch


class Batch(NamedTuple):
    """One rank's local batch.

    Attributes:
        inputs: [b, ...], on the rank's device: of images float32 [b, channels, height, width], normalised; of tokens int64.
        targets: [b, ...], as the task takes them: classes, int64 [b], of mixed samples their probabilities, [b, classes].
            Padding is at the end, and repeats samples.
        count: samples in the GLOBAL batch, without padding: the divisor of its mean loss. Known without communication.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  # nobody calls tuple.count of a batch


def real_samples(count: int, dp_rank: int, dp_size: int) -> int:
    """Return how many samples of a local batch are no padding: a rank reads every `dp_size`-th of `count`, the GLOBAL batch."""
    return len(range(dp_rank, count, dp_size))


class BatchSize(NamedTuple):
    """The sizes of a batch, which are known before it is read.

    Attributes:
        size: samples in this rank's local batch, padding included.
        count: samples in the GLOBAL batch, without padding.
    """

    size: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  # nobody calls tuple.count of a batch size
