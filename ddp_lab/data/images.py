"""Image files: how they are found, decoded, and made samples of one size, with random transforms for training.

Pillow decodes: torchvision's decoders are as fast, but deprecated. torchvision resizes: its uint8 kernels are faster than
Pillow's. It is imported at the first use, because that takes 1.5 s.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, ImageOps

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.augment import seeded

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
FORMATS = ("JPEG", "PNG", "WEBP")  # Pillow's other decoders are not needed, and some have had security bugs


class ImageError(ConfigError):
    """A file that cannot be decoded. The message names it."""


def find_files(folder: str, name: str, seen: set[str]) -> Iterator[str]:
    """Yield the names of the image files in a folder and its subfolders, without those that begin with a dot.

    Args:
        folder: path of the folder.
        name: what the names begin with.
        seen: the directories that were searched already: none is searched twice, although links may form a loop.
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
    """Resize an image, uint8 [channels, height, width], to a shorter side of `short_side` pixels: bilinear, antialiased."""
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


@dataclass(frozen=True)
class ImageOptions:
    """How images are transformed: the run's seed, and the keys of these names in conf/data/own.yaml, which says what they do.

    Raises:
        ConfigError: `resize` or `crop_scale` is not allowed.
    """

    seed: int
    channels: int
    image_size: int
    resize: int | None
    crop_scale: Sequence[float] | None
    randaugment: int | None
    erasing: float
    mean: Sequence[float]

    def __post_init__(self) -> None:
        if self.short_side < self.image_size:
            raise ConfigError(f"data.resize={self.resize}: must be at least data.image_size={self.image_size}")
        if self.crop_scale is not None and not (len(self.crop_scale) == 2 and self.crop_scale[0] <= self.crop_scale[1] <= 1):
            raise ConfigError(
                f"data.crop_scale={list(self.crop_scale)}: must be null or the smallest and the largest area of a crop, for "
                "example [0.08,1.0]"
            )

    @property
    def short_side(self) -> int:
        """Length in pixels to which the shorter side of every image is resized, before any crop."""
        return self.resize or round(self.image_size * 8 / 7)

    def view(self, augment: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the transform of resized images to samples.

        Args:
            augment: with the random transforms of training, which draw from torch's global generator only. The device flips
                images (augment.py).
        """
        from torchvision.transforms import v2

        centre = partial(evaluation_view, short_side=self.short_side, image_size=self.image_size)
        if not augment:
            return centre
        steps: list[Callable[..., Any]] = [centre]
        if self.crop_scale:
            smallest, largest = self.crop_scale
            steps = [v2.RandomResizedCrop(self.image_size, scale=(smallest, largest), antialias=True)]
        if self.randaugment is not None:  # on Pillow's images 3.6 times as fast as on tensors
            steps += [v2.ToPILImage(), v2.RandAugment(magnitude=self.randaugment), v2.PILToTensor()]
        if self.erasing:
            fill = [float(round(255 * value)) for value in self.mean]
            steps.append(v2.RandomErasing(self.erasing, value=cast(float, fill if len(fill) > 1 else fill[0])))
        return v2.Compose(steps)


@dataclass(frozen=True)
class Streamed:
    """Samples that are read one by one when they are needed.

    Attributes:
        read: returns an image by its number, uint8 [channels, height, width], whose shorter side is resized already, and its
            class. It may draw from the global generators.
        numbers: int64 [N], the images, in order. Worker processes share it, unlike a list of integers.
        images: how a sample is made of an image.
        augment: whether with the random transforms of training.
    """

    read: Callable[[int], tuple[torch.Tensor, int]]
    numbers: torch.Tensor
    images: ImageOptions
    augment: bool

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.numbers)

    is_image = True  # the loader augments and normalises the inputs

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of a sample."""
        return (self.images.channels, self.images.image_size, self.images.image_size)

    @property
    def forms(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of a sample's input and of its target, as the loader returns them."""
        return [(self.shape, torch.get_default_dtype()), ((), torch.int64)]

    @cached_property
    def view(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The transform of resized images to samples."""
        return self.images.view(self.augment)

    def sample(self, epoch: int, index: int) -> tuple[torch.Tensor, int]:
        """Return an image, uint8 [channels, height, width], and its class; a function of seed, epoch and index."""
        with seeded(f"image seed={self.images.seed} epoch={epoch} index={index}"):
            image, target = self.read(int(self.numbers[index]))
            return self.view(image), target

    def subset(self, indices: torch.Tensor, augment: bool) -> "Streamed":
        """Return some of the samples, int64 [n], as training samples (`augment`) or to evaluate with."""
        return replace(self, numbers=self.numbers[indices], augment=augment)
