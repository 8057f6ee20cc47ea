"""model=simple_cnn"""

from collections import OrderedDict

from by_block import draw_by_block
from settings import DRAWS_BY_BLOCK, IMAGE_SIZE, IN_CHANNELS, NUM_CLASSES
from torch import nn


def build_model() -> nn.Module:
    """Return a small network: one convolution and one linear layer."""
    pixels = (IMAGE_SIZE // 2) ** 2
    blocks = OrderedDict(
        conv=nn.Sequential(nn.Conv2d(IN_CHANNELS, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        head=nn.Sequential(nn.Flatten(), nn.Linear(16 * pixels, NUM_CLASSES)),
    )
    model = nn.Sequential(blocks)
    if DRAWS_BY_BLOCK:
        draw_by_block(model)
    return model
