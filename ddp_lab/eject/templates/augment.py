"""data.crop_padding and data.flip"""

import torch
import torch.nn.functional as F
from seeds import seed_of
from settings import CROP_PADDING, FLIP, SEED
from torch import Tensor


def draw_offsets(samples: int, epoch: int) -> Tensor:
    """Return pixels down, pixels to the right and whether to flip, of each sample: [3, samples]."""
    generator = torch.Generator().manual_seed(seed_of(f"augment seed={SEED} epoch={epoch}"))
    pixels = (-CROP_PADDING, CROP_PADDING + 1)
    shifts = torch.randint(*pixels, (2, samples), generator=generator)
    flips = torch.randint(0, 1 + FLIP, (1, samples), generator=generator)
    return torch.cat([shifts, flips])


def augment(images: Tensor, offsets: Tensor) -> Tensor:
    """Return images, [n, channels, height, width], flipped and shifted by their offsets, [3, n]."""
    is_flipped = offsets[2].bool().to(images.device)
    images = torch.where(is_flipped[:, None, None, None], images.flip(-1), images)
    if CROP_PADDING > 0:
        height, width = images.shape[-2:]
        padded = F.pad(images, [CROP_PADDING] * 4)
        starts = (CROP_PADDING - offsets[:2]).T.tolist()
        crops = [
            image[:, y : y + height, x : x + width]
            for image, (y, x) in zip(padded, starts, strict=True)
        ]
        images = torch.stack(crops)
    return images
