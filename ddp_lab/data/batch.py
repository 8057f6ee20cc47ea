"""One rank's local batches: which samples they have, and how they are made.

With W ranks and a global batch of B samples, rank r takes positions r, r + W, r + 2W, ... of the
epoch's permutation, as torch's `DistributedSampler` does, in local batches of B / W. The local
batches of step s on all ranks together are therefore the slice [s * B, (s + 1) * B) of the
permutation, for any W. If W does not divide the number of samples, a few of them are repeated as
padding at the end of the last local batch of some ranks, and do not count
(`Strategy.valid_samples`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from ddp_lab.data.labels import LabelRange

if TYPE_CHECKING:
    from ddp_lab.data.trees import Tree

    T = TypeVar("T", bound=Tree)
else:
    T = TypeVar("T")


class Batch(NamedTuple):
    """One rank's local batch.

    Attributes:
        inputs: [b, ...], on the rank's device: of images float32 [b, channels, height, width],
            normalised; of tokens int64. Or a tuple or dict of such tensors.
        targets: [b, ...], as the task takes them: classes, int64 [b], of mixed samples their
            probabilities, [b, classes]. Padding is at the end, and repeats samples. Or a tuple or
            dict of tensors; or None, for a loss of the outputs alone.
        global_size: samples in the GLOBAL batch, without padding: the divisor of its mean loss.
            Known without communication.
    """

    inputs: "Tree"
    targets: "Tree"
    global_size: int


@dataclass(frozen=True)
class LoaderOptions:
    """How a loader makes batches of the samples.

    Attributes:
        batch_size: samples in the GLOBAL batch; must be divisible by `dp_size`.
        dp_rank: number of this rank's data-parallel replica.
        dp_size: number of data-parallel replicas, among which every batch is divided.
        device: device of the batches.
        mean, std: mean and standard deviation of images in [0, 1]: one value, or one per channel.
        shuffle: whether every epoch has a random order.
        seed: seed of the sample order and the augmentation.
        crop_padding: zeros on each side of an image, in pixels, before a crop of its size at
            random.
        ignore: value of the border of a mask, [height, width], that is the target of an image and
            is cropped with it.
        flip: whether each image is flipped left to right with probability 1/2.
        num_workers: number of processes of a `WorkerLoader`; 0: it loads in the main process.
        labels: gets the range of the targets; None: nobody needs it.
    """

    batch_size: int
    dp_rank: int
    dp_size: int
    device: torch.device
    mean: Sequence[float]
    std: Sequence[float]
    shuffle: bool
    seed: int = 0
    crop_padding: int = 0
    flip: bool = False
    ignore: int = 255
    num_workers: int = 0
    labels: LabelRange | None = None


def size_of_evaluated(batch_size: int, dp_size: int, accumulate: int) -> int:
    """Return the size of a GLOBAL batch of an evaluation: that of the micro-batches of training.

    The outputs of a complete local batch may not fit where training accumulates gradients: 512
    samples of 1,024 tokens have 98 GiB of logits in float32, if there are 50,304 tokens.

    Args:
        batch_size: samples in the GLOBAL batch of training, a multiple of `dp_size`.
        dp_size: number of data-parallel replicas.
        accumulate: number of gradient-accumulation steps.
    """
    return dp_size * math.ceil(batch_size / dp_size / accumulate)


def apply(function: Callable[[torch.Tensor], torch.Tensor], tree: T) -> T:
    """Return the result for a tensor, or as `trees.apply`.

    A run whose batches are tensors does not load that module.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    from ddp_lab.data import trees

    return trees.apply(function, tree)


def local_order(samples: int, rank: int, ranks: int, seed: int | None, epoch: int) -> torch.Tensor:
    """Return the indices of a rank's samples in an epoch, int64 [ceil(samples / ranks)].

    They are those of `DistributedSampler`.

    That class makes a Python integer of each index, which takes 5 ms for 60,000 samples: LeNet
    trains on 4,000 meanwhile.

    Args:
        samples: number of samples of all ranks.
        rank, ranks: the rank among those that divide them.
        seed: seed of the order of every epoch; None: they are in order.
        epoch: number of the epoch.
    """
    order = torch.arange(samples)
    if seed is not None:
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))
    total = math.ceil(samples / ranks) * ranks
    return order.repeat(math.ceil(total / samples))[rank:total:ranks].contiguous()
