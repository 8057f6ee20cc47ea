"""model=lenet"""

from collections import OrderedDict

from by_block import draw_by_block
from settings import DRAWS_BY_BLOCK, IMAGE_SIZE, IN_CHANNELS, INIT_STD, NUM_CLASSES
from torch import nn


def initialize(module: nn.Module) -> None:
    """Draw the weights of convolutions and linear layers, and set their biases to 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.normal_(layer.weight, std=INIT_STD)
            nn.init.zeros_(layer.bias)


def build_model() -> nn.Module:
    """Return the LeNet of Dive into Deep Learning, section 13.5."""
    side = ((IMAGE_SIZE - 2) // 2 - 4) // 2
    blocks = OrderedDict(
        conv1=nn.Sequential(nn.Conv2d(IN_CHANNELS, 20, 3), nn.ReLU(), nn.AvgPool2d(2)),
        conv2=nn.Sequential(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2)),
        fc1=nn.Sequential(nn.Flatten(), nn.Linear(50 * side * side, 128), nn.ReLU()),
        fc2=nn.Linear(128, NUM_CLASSES),
    )
    model = nn.Sequential(blocks)
    if DRAWS_BY_BLOCK:
        draw_by_block(model)
    if INIT_STD is not None:
        initialize(model)
    return model
