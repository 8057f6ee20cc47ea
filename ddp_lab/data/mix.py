"""Mixup and CutMix: each sample of a training batch is mixed with another one, on the device.

Sample p of a global batch of B is mixed with sample p + B/2, modulo B. Rank r of W reads samples r, r + W, ..., so if W divides
B/2, the partner of its sample i is its sample i + b/2, where b = B/W: no rank needs another rank's samples, and the batch is
mixed alike for any W. How a step's batch is mixed depends only on the run's seed and the number of the step.

Mixed targets are probabilities, [b, classes], which are all 0 for padding.
"""

import hashlib
import math
from random import Random

import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.batch import IGNORE, Batch


def draw(mixup: float, cutmix: float, size: int, seed: int, step: int) -> tuple[float, ...]:
    """Draw how the batch of a step is mixed.

    The weight of a sample's own target is drawn from Beta(alpha, alpha). If mixup and cutmix are both above 0, either is chosen
    with probability 1/2.

    Args:
        mixup: alpha of mixup (Zhang et al. 2018, arXiv:1710.09412); 0: never.
        cutmix: alpha of CutMix (Yun et al. 2019, arXiv:1905.04899); 0: never.
        size: height and width of the images, in pixels.
        seed: the run's seed.
        step: number of the step.

    Returns:
        The weight of a sample's own target; and of a rectangle, the weight of the partner's pixels in it, its first row, the
        row after its last, its first column and the column after its last.
    """
    digest = hashlib.sha256(f"mix seed={seed} step={step}".encode()).digest()
    random = Random(int.from_bytes(digest, "big"))
    cut = cutmix > 0 and (mixup == 0 or random.random() < 0.5)
    alpha = cutmix if cut else mixup
    own = random.betavariate(alpha, alpha)
    if not cut:
        return own, 1 - own, 0, size, 0, size
    half = int(size * math.sqrt(1 - own) / 2)  # the rectangle is cut off at the border, so `own` is computed again
    bounds = [
        max(0, min(size, center + side))
        for center in (random.randrange(size), random.randrange(size))
        for side in (-half, half)
    ]
    top, bottom, left, right = bounds
    return 1 - (bottom - top) * (right - left) / size**2, 1.0, top, bottom, left, right


class Mix:
    """Mixup and CutMix of every full training batch. A partial last batch stays unmixed.

    Args:
        mixup, cutmix: alpha, as for `draw`; at least one is above 0.
        batch_size: samples in the GLOBAL batch.
        dp_size: number of local batches that it consists of.
        image_size: height and width of the images, in pixels.
        num_classes: number of classes of the dataset.
        seed: the run's seed.

    Raises:
        ConfigError: local batches have an odd number of samples.
    """

    def __init__(
        self,
        mixup: float,
        cutmix: float,
        *,
        batch_size: int,
        dp_size: int,
        image_size: int,
        num_classes: int,
        seed: int,
    ):
        if batch_size // dp_size % 2:
            lower = batch_size // (2 * dp_size) * 2 * dp_size
            nearest = " or ".join(str(size) for size in (lower, lower + 2 * dp_size) if size)
            raise ConfigError(
                f"mixup={mixup:g}, cutmix={cutmix:g}: mix the samples of a local batch in pairs, but a global batch of "
                f"{batch_size} has local batches of {batch_size // dp_size}; use a global batch of {nearest}, or mixup=0 "
                "cutmix=0"
            )
        self.mixup, self.cutmix, self.seed = mixup, cutmix, seed
        self.batch_size, self.image_size, self.num_classes = batch_size, image_size, num_classes
        self._drawn = torch.zeros(6)

    def to(self, device: torch.device) -> "Mix":
        """Mix batches on another device, and return this object."""
        self._drawn = self._drawn.to(device)  # a CUDA graph captures its address
        return self

    def prepare(self, step: int) -> None:
        """Draw how the batch of the next step is mixed.

        Args:
            step: number of the step since the beginning of the run.
        """
        drawn = draw(self.mixup, self.cutmix, self.image_size, self.seed, step)
        self._drawn.copy_(torch.tensor(drawn), non_blocking=True)

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch, mixed if it is full. Nothing is decided by values on the device, so a CUDA graph can capture it."""
        inputs, targets, count = batch
        if count < self.batch_size:
            return batch
        own, weight, top, bottom, left, right = self._drawn
        pixels = torch.arange(self.image_size, device=inputs.device)
        inside = ((pixels >= top) & (pixels < bottom))[:, None] & (pixels >= left) & (pixels < right)  # [height, width]
        wanted = (targets[:, None] == torch.arange(self.num_classes, device=targets.device)).to(inputs.dtype)
        partners, wanted_of_partners = (tensor.roll(len(tensor) // 2, 0) for tensor in (inputs, wanted))
        return Batch(inputs.lerp(partners, inside * weight), wanted_of_partners.lerp(wanted, own), count)


def classes_of(targets: torch.Tensor) -> torch.Tensor:
    """Return the class of each sample, [b]: for mixed targets, [b, classes], the most probable one. IGNORE is padding."""
    return targets if targets.dim() == 1 else torch.where(targets.any(1), targets.argmax(1), IGNORE)
