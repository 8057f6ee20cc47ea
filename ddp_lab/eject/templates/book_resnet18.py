"""model=book_resnet18"""

from collections import OrderedDict

import torch.nn.functional as F
from settings import IN_CHANNELS, INIT_STD, NUM_CLASSES
from torch import Tensor, nn


class Residual(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Identity()
        if in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(inputs)))))
        return F.relu(outputs + self.shortcut(inputs))


def initialize(module: nn.Module) -> None:
    """Draw the weights of convolutions and linear layers."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.normal_(layer.weight, std=INIT_STD)


def build_model() -> nn.Module:
    """Return the ResNet-18 of Dive into Deep Learning, section 13.6."""
    stem = nn.Conv2d(IN_CHANNELS, 64, 3, padding=1)
    blocks = OrderedDict(stem=nn.Sequential(stem, nn.BatchNorm2d(64), nn.ReLU()))
    channels = 64
    for number, (width, stride) in enumerate([(64, 1), (128, 2), (256, 2), (512, 2)], 1):
        blocks[f"layer{number}_0"] = Residual(channels, width, stride)
        blocks[f"layer{number}_1"] = Residual(width, width)
        channels = width
    head = nn.Linear(channels, NUM_CLASSES)
    blocks["head"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    model = nn.Sequential(blocks)
    if INIT_STD is not None:
        initialize(model)
    return model
