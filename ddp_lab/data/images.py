"""Image files: found, decoded, and made samples of one size, at random for training.

Pillow decodes: torchvision's decoders are as fast, but deprecated. torchvision resizes: its uint8
kernels are faster than Pillow's. It is imported at the first use, because that takes 1.5 s.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, ImageOps

from ddp_lab.config.errors import ConfigError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
# Pillow's other decoders are not needed, and some have had security bugs
FORMATS = ("JPEG", "PNG", "WEBP")


class ImageError(ConfigError):
    """A file that cannot be decoded. The message names it."""


def find_files(folder: str, name: str, seen: set[str]) -> Iterator[str]:
    """Yield the image files' names in a folder and its subfolders, without hidden files.

    Args:
        folder: path of the folder.
        name: what the names begin with.
        seen: the directories that were searched already: none is searched twice, although links may
            form a loop.
    """
    if (real := os.path.realpath(folder)) in seen:
        return
    seen.add(real)
    for entry in os.scandir(folder):
        if entry.name.startswith("."):  # also the `._` files that macOS writes beside images
            continue
        if os.path.isdir(entry.path):  # unlike entry.is_dir(), it accepts a link to itself
            yield from find_files(entry.path, f"{name}/{entry.name}", seen)
        elif entry.name.lower().endswith(SUFFIXES):
            yield f"{name}/{entry.name}"


def decode(path: str | os.PathLike[str]) -> Image.Image:
    """Return a JPEG, PNG or WebP image, in the orientation of its EXIF data.

    Of an animation it is the first frame.

    Raises:
        ImageError: the file is missing, truncated or not an image.
    """
    try:
        with Image.open(path, formats=FORMATS) as image:
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return image
    except MemoryError:
        raise
    # Pillow raises OSError, SyntaxError, ValueError, struct.error and others for malformed files
    except Exception as error:
        if isinstance(error, Image.UnidentifiedImageError):
            reason = "not a JPEG, PNG or WebP image"
        else:
            reason = str(error)
        raise ImageError(
            f"{os.fspath(path)}: cannot be decoded ({reason or type(error).__name__})"
        ) from None


def to_tensor(image: Image.Image, channels: int) -> torch.Tensor:
    """Return the pixels of an image of Pillow.

    Grey, 16-bit grey, palette, RGBA and CMYK images are converted; transparency is dropped.

    Args:
        image: of any mode.
        channels: 3 for RGB, 1 for grey.

    Returns:
        uint8 [channels, height, width]; in memory the channels of a pixel are neighbours, which
        torchvision resizes fastest.
    """
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip to 255
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return torch.from_numpy(grey).expand(channels, -1, -1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Palette images with Transparency")
        pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    return torch.from_numpy(pixels[..., None] if channels == 1 else pixels).permute(2, 0, 1)


@dataclass(frozen=True)
class ImageOptions:
    """How images are transformed: the keys in conf/data/own.yaml, which says what they do.

    Raises:
        ConfigError: `resize` or `crop_scale` is not allowed.
    """

    channels: int
    image_size: int
    resize: int | None = None
    crop_scale: Sequence[float] | None = None
    randaugment: int | None = None
    erasing: float = 0.0
    mean: Sequence[float] = (0.0,)

    def __post_init__(self) -> None:
        if self.short_side < self.image_size:
            raise ConfigError(
                f"data.resize={self.resize}: must be at least data.image_size={self.image_size}"
            )
        if self.crop_scale is not None and not (
            len(self.crop_scale) == 2 and self.crop_scale[0] <= self.crop_scale[1] <= 1
        ):
            raise ConfigError(
                f"data.crop_scale={list(self.crop_scale)}: must be null or the smallest and the "
                "largest area of a crop, for example [0.08,1.0]"
            )

    @property
    def short_side(self) -> int:
        """Length in pixels to which the shorter side of every image is resized, before any crop."""
        return self.resize or round(self.image_size * 8 / 7)

    @property
    def augments(self) -> bool:
        """Whether images get random transforms in training."""
        return self.crop_scale is not None or self.randaugment is not None or self.erasing > 0

    def view(self, augment: bool) -> Callable[[Image.Image], torch.Tensor]:
        """Return the transform of images to samples, uint8 [channels, image_size, image_size].

        The shorter side is resized, bilinear and antialiased, before the crop.

        Args:
            augment: with the random transforms of training, which draw from torch's global
                generator only, in place of the square in the centre. The device flips images
                (augment.py).
        """
        from torchvision.transforms import v2

        steps: list[Callable[..., Any]] = [
            partial(to_tensor, channels=self.channels),
            v2.Resize(self.short_side, antialias=True),
        ]
        if augment and self.crop_scale:
            smallest, largest = self.crop_scale
            steps.append(
                v2.RandomResizedCrop(self.image_size, scale=(smallest, largest), antialias=True)
            )
        else:
            steps.append(v2.CenterCrop(self.image_size))

        # on Pillow's images 3.6 times as fast as on tensors
        if augment and self.randaugment is not None:
            steps += [v2.ToPILImage(), v2.RandAugment(magnitude=self.randaugment), v2.PILToTensor()]
        if augment and self.erasing:
            fill = [float(round(255 * value)) for value in self.mean]
            steps.append(
                v2.RandomErasing(
                    self.erasing, value=cast(float, fill if len(fill) > 1 else fill[0])
                )
            )
        return v2.Compose(steps)
