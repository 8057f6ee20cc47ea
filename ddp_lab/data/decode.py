"""Decoding of an image file, and its view for evaluation: plain functions on uint8 tensors, without randomness.

Pillow decodes: torchvision's decoders are as fast, but deprecated. torchvision resizes: its uint8 kernels are faster than
Pillow's. It is imported at the first use, because that takes 1.5 s.
"""

import os
import warnings

import numpy as np
import torch
from PIL import Image, ImageOps

from ddp_lab.config.errors import ConfigError

FORMATS = ("JPEG", "PNG", "WEBP")  # Pillow's other decoders are not needed, and some have had security bugs


class ImageError(ConfigError):
    """A file that cannot be decoded. The message names it."""


def decode(path: str | os.PathLike[str], channels: int) -> torch.Tensor:
    """Return the pixels of a JPEG, PNG or WebP file, in the orientation that its EXIF data asks for.

    Grey, 16-bit grey, palette, RGBA and CMYK images are converted; transparency is dropped. The first frame of an animation
    counts.

    Args:
        path: the file.
        channels: 3 for RGB, 1 for grey.

    Returns:
        uint8 [channels, height, width]; in memory the channels of a pixel are neighbours, which torchvision resizes fastest.

    Raises:
        ImageError: the file is missing, truncated or not an image.
    """
    try:
        with Image.open(path, formats=FORMATS) as image:
            return to_tensor(image, channels)
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, struct.error and others for malformed files
        reason = "not a JPEG, PNG or WebP image" if isinstance(error, Image.UnidentifiedImageError) else str(error)
        raise ImageError(f"{os.fspath(path)}: cannot be decoded ({reason or type(error).__name__})") from None


def to_tensor(image: Image.Image, channels: int) -> torch.Tensor:
    """Return the pixels of an image of Pillow as `decode` does: uint8 [channels, height, width]."""
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip to 255
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return torch.from_numpy(grey).expand(channels, -1, -1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Palette images with Transparency")
        pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    return torch.from_numpy(pixels[..., None] if channels == 1 else pixels).permute(2, 0, 1)


def resize(image: torch.Tensor, short_side: int) -> torch.Tensor:
    """Resize an image so that its shorter side has `short_side` pixels: bilinear, with antialiasing.

    Args:
        image: uint8 [channels, height, width].

    Returns:
        uint8 [channels, height', width']; `image` itself if it has this size.
    """
    from torchvision.transforms.v2 import functional

    return functional.resize(image, [short_side], antialias=True)


def evaluation_view(image: torch.Tensor, short_side: int, image_size: int) -> torch.Tensor:
    """Return what a model sees of an image without augmentation: the square in the centre of the resized image.

    Args:
        image: uint8 [channels, height, width].
        short_side: length in pixels to which the shorter side is resized; at least `image_size`.
        image_size: height and width of the result, in pixels.

    Returns:
        uint8 [channels, image_size, image_size].
    """
    from torchvision.transforms.v2 import functional

    return functional.center_crop(resize(image, short_side), [image_size, image_size])
