"""data=synthetic"""

import torch
from settings import IMAGE_SIZE, IN_CHANNELS, NUM_CLASSES, TEST_SIZE, TRAIN_SIZE
from torch import Tensor


def load_data() -> dict[str, tuple[Tensor, Tensor]]:
    """Return made-up images, uint8 [n, channels, height, width], and their classes.

    Each image is half the picture of its class, half noise.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (IN_CHANNELS, IMAGE_SIZE, IMAGE_SIZE)

    def noise(number: int) -> Tensor:
        return torch.randint(0, 128, (number, *shape), dtype=torch.uint8, generator=generator)

    pictures = noise(NUM_CLASSES)
    sets = {}
    for name, size in {"train": TRAIN_SIZE, "test": TEST_SIZE}.items():
        targets = torch.randint(0, NUM_CLASSES, (size,), generator=generator)
        sets[name] = noise(size) + pictures[targets], targets
    return sets
