"""Random crops and horizontal flips of training images, computed on the device for a whole batch at once.

The crop and flip of a sample depend only on the run's seed, the epoch and the sample's index. They do not depend on the
rank that reads the sample, on its position in the epoch, or on where the run was resumed.
"""

import hashlib

import torch


def draw(samples: int, crop_padding: int, flip: bool, seed: int, epoch: int) -> torch.Tensor:
    """Draw the crop and flip of every sample of the dataset in one epoch, on the CPU.

    Every rank draws them for all samples, so the ranks agree without communication; 60,000 samples take less than 1 ms.

    The generator's seed is the first 32 bits of a SHA-256 of (seed, epoch), because torch's CPU generator uses only the lowest
    32 bits of its seed. It is not seed + epoch, which already seeds the permutation.

    Args:
        samples: number of samples in the dataset.
        crop_padding: zeros on each side of an image before a crop of its size; the largest shift, in pixels.
        flip: whether each sample is flipped with probability 1/2.
        seed: the run's seed.
        epoch: number of the epoch.

    Returns:
        int64 [3, samples]: pixels down and pixels to the right, both uniform in -crop_padding to
        crop_padding, and 1 for a flipped sample.
    """
    digest = hashlib.sha256(f"augment seed={seed} epoch={epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    shifts = torch.randint(-crop_padding, crop_padding + 1, (2, samples), generator=generator)
    flips = torch.randint(0, 1 + flip, (1, samples), generator=generator)
    return torch.cat([shifts, flips])


def augment(images: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, flip: torch.Tensor) -> torch.Tensor:
    """Flip each image left to right where `flip` is set, then shift it and fill the uncovered border with 0.

    This is a gather from computed rows and columns. Nothing is decided on the host, so a CUDA graph can capture it.

    Args:
        images: uint8 [b, channels, height, width].
        dy, dx: int64 [b], pixels down and to the right.
        flip: bool or int64 [b].

    Returns:
        uint8 [b, channels, height, width], contiguous.
    """
    size, channels, height, width = images.shape
    sample, channel, y, x = (torch.arange(n, device=images.device) for n in (size, channels, height, width))
    rows, columns = y - dy[:, None], x - dx[:, None]  # [b, height], [b, width]: where each pixel comes from
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    columns = torch.where(flip.bool()[:, None], width - 1 - columns, columns)
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    pixels = images[sample[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None, :]]
    return pixels * inside[:, None]
