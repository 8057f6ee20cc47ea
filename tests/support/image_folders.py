"""Small folders of images of many sizes, made for a test."""

from pathlib import Path

import numpy as np
from PIL import Image

FORMATS = ("png", "jpg", "webp")


def write_folder(
    root: Path, sizes: dict[str, int], classes: int = 3, sides: tuple[int, int] = (30, 60)
) -> Path:
    """Write DIR/SPLIT/CLASS/FILE images, which differ from each other, and return `root`.

    Args:
        sizes: number of images of each split; image i is of class i modulo `classes`.
        sides: smallest and largest height and width in pixels.
    """
    draw = np.random.default_rng(0)
    for split, size in sizes.items():
        for number in range(size):
            folder = root / split / f"class {number % classes}"
            folder.mkdir(parents=True, exist_ok=True)
            height, width = draw.integers(*sides, 2)
            rows, columns = np.mgrid[:height, :width]
            pixels = np.stack(
                [rows * 5 + number, columns * 3 + 20 * (number % classes), rows + columns], axis=-1
            )
            noise = draw.integers(0, 40, pixels.shape)
            image = Image.fromarray(((pixels + noise) % 256).astype(np.uint8))
            image.save(folder / f"{number:04}.{FORMATS[number // classes % len(FORMATS)]}")
    return root
