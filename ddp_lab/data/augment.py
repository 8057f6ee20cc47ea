"""Augmentation of training batches on the device: random crops, flips, mixup and CutMix.

Everything random is drawn from a seed of (seed, epoch or step, index), by seeds.py.
"""

import math
import random
from dataclasses import dataclass

import torch

from ddp_lab.config.errors import ConfigError, multiples
from ddp_lab.data.batch import Batch
from ddp_lab.data.seeds import seed_of


def draw_offsets(
    samples: int, crop_padding: int, flip: bool, seed: int, epoch: int
) -> torch.Tensor:
    """Draw the crop and flip of every sample of the dataset in one epoch, on the CPU.

    Every rank draws them for all samples, so the ranks agree without communication; 60,000 samples
    take less than 1 ms.

    Args:
        samples: number of samples in the dataset.
        crop_padding: zeros on each side of an image before a crop of its size; the largest shift,
            in pixels.
        flip: whether each sample is flipped with probability 1/2.
        seed: the run's seed.
        epoch: number of the epoch.

    Returns:
        int64 [3, samples]: pixels down and pixels to the right, both uniform in -crop_padding to
        crop_padding, and 1 for a flipped sample.
    """
    generator = torch.Generator().manual_seed(seed_of("augment", seed=seed, epoch=epoch))
    shifts = torch.randint(-crop_padding, crop_padding + 1, (2, samples), generator=generator)
    flips = torch.randint(0, 1 + flip, (1, samples), generator=generator)
    return torch.cat([shifts, flips])


def augment(
    images: torch.Tensor, offsets: torch.Tensor, crop_padding: int, fill: int = 0
) -> torch.Tensor:
    """Flip images where their offsets say so, then shift them and fill the uncovered borders.

    The shift is a gather from computed rows and columns. Nothing is decided by values on the
    device, so a CUDA graph can capture it.

    Args:
        images: [b, channels, height, width]; or masks, which are augmented in the same way.
        offsets: int64 [3, b], as `draw_offsets` draws them.
        crop_padding: as in `draw_offsets`; 0: no image is shifted, which is seven times as fast on
            a CPU.
        fill: value of the border.

    Returns:
        [b, channels, height, width], contiguous.
    """
    dy, dx, flip = offsets
    images = torch.where(flip.bool()[:, None, None, None], images.flip(-1), images)
    if crop_padding == 0:
        return images

    size, channels, height, width = images.shape
    sample, channel, y, x = (
        torch.arange(n, device=images.device) for n in (size, channels, height, width)
    )
    # where each pixel comes from
    rows = y - dy[:, None]  # [b, height]
    columns = x - dx[:, None]  # [b, width]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[
        :, None, :
    ]
    rows = rows.clamp(0, height - 1)
    columns = columns.clamp(0, width - 1)
    pixels = images[
        sample[:, None, None, None],
        channel[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
    return torch.where(inside[:, None], pixels, fill)


def draw_mix(mixup: float, cutmix: float, size: int, seed: int, step: int) -> tuple[float, ...]:
    """Draw how the batch of a step is mixed.

    The weight of a sample's own target is drawn from Beta(alpha, alpha). If mixup and cutmix are
    both above 0, either is chosen with probability 1/2.

    Args:
        mixup: alpha of mixup (Zhang et al. 2018, arXiv:1710.09412); 0: never.
        cutmix: alpha of CutMix (Yun et al. 2019, arXiv:1905.04899); 0: never.
        size: height and width of the images, in pixels.
        seed: the run's seed.
        step: number of the step since the beginning of the run.

    Returns:
        The weight of a sample's own target; and of a rectangle, the weight of the partner's pixels
        in it, its first row, the row after its last, its first column and the column after its
        last.
    """
    draw = random.Random(seed_of("mix", bits=256, seed=seed, step=step))
    cut = cutmix > 0 and (mixup == 0 or draw.random() < 0.5)
    alpha = cutmix if cut else mixup
    kept_share = draw.betavariate(alpha, alpha)
    if not cut:
        return kept_share, 1 - kept_share, 0, size, 0, size
    # the rectangle is cut off at the border, so `own` is computed again
    half = int(size * math.sqrt(1 - kept_share) / 2)
    centers = draw.randrange(size), draw.randrange(size)
    top, bottom, left, right = (
        max(0, min(size, center + side)) for center in centers for side in (-half, half)
    )
    return 1 - (bottom - top) * (right - left) / size**2, 1.0, top, bottom, left, right


@dataclass
class Mix:
    """Mixup and CutMix of every full training batch: each sample is mixed with another one.

    A partial last batch stays unmixed.

    Sample p of a global batch of B is mixed with sample p + B/2, modulo B. Rank r of W reads
    samples r, r + W, ..., so if W divides B/2, the partner of its sample i is its sample i + b/2,
    where b = B/W: no rank needs another rank's samples, and the batch is mixed alike for any W.

    Attributes:
        mixup, cutmix, image_size, seed: as in `draw_mix`; at least one of the first two is above 0.
        batch_size: samples in the GLOBAL batch.
        dp_size: number of local batches that it consists of.
        num_classes: number of classes of the dataset.

    Raises:
        ConfigError: local batches have an odd number of samples.
    """

    mixup: float
    cutmix: float
    batch_size: int
    dp_size: int
    image_size: int
    num_classes: int
    seed: int

    def __post_init__(self) -> None:
        local = self.batch_size // self.dp_size
        if local % 2:
            raise ConfigError(
                f"mixup={self.mixup:g}, cutmix={self.cutmix:g}: mix the samples of a local batch "
                f"in pairs, but a global batch of {self.batch_size} has local batches of {local}; "
                f"use a global batch of {multiples(self.batch_size, 2 * self.dp_size)}, or mixup=0 "
                "cutmix=0"
            )
        self._drawn = torch.zeros(6)

    def to(self, device: torch.device) -> "Mix":
        """Mix batches on another device, and return this object."""
        self._drawn = self._drawn.to(device)  # a CUDA graph captures its address
        return self

    def prepare(self, step: int) -> None:
        """Draw how the batch of the next step is mixed.

        `step` is its number since the beginning of the run.
        """
        drawn = draw_mix(self.mixup, self.cutmix, self.image_size, self.seed, step)
        self._drawn.copy_(torch.tensor(drawn), non_blocking=True)

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch, mixed if it is full.

        Nothing is decided by values on the device, so a CUDA graph can capture it.
        """
        inputs, targets, global_size = batch
        if global_size < self.batch_size:
            return batch
        assert isinstance(inputs, torch.Tensor), "images are mixed"
        assert isinstance(targets, torch.Tensor), "they have a class each"

        kept_share, weight, top, bottom, left, right = self._drawn
        pixels = torch.arange(self.image_size, device=inputs.device)
        # [height, width]
        inside = (
            ((pixels >= top) & (pixels < bottom))[:, None] & (pixels >= left) & (pixels < right)
        )
        wanted = (targets[:, None] == torch.arange(self.num_classes, device=targets.device)).to(
            inputs.dtype
        )

        partners, wanted_of_partners = (
            tensor.roll(len(tensor) // 2, 0) for tensor in (inputs, wanted)
        )
        return Batch(
            inputs.lerp(partners, inside * weight),
            wanted_of_partners.lerp(wanted, kept_share),
            global_size,
        )
