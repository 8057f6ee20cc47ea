"""The ResNet-18 of Dive into Deep Learning, section 13.6, as a chain of ten blocks."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ddp_lab.config.types import Positive
from ddp_lab.models.chain import Chain, init_normal, require_image_size

STAGES = [(64, 1), (128, 2), (256, 2), (512, 2)]  # channels, and stride of the first of two blocks


class Residual(nn.Module):
    """A residual block: two 3x3 convolutions with BatchNorm, and a shortcut.

    The shortcut is the identity or, if the number of channels changes, a 1x1 convolution without
    BatchNorm. The stride is that of the first convolution and of the shortcut's.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        if in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride)
        else:
            self.shortcut = nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [b, out_channels, height / stride, width / stride], rounded up.

        The input is [b, in_channels, height, width].
        """
        outputs = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(inputs)))))
        return F.relu(outputs + self.shortcut(inputs))


def book_resnet18(
    in_channels: int, image_size: int, num_classes: int, init_std: Positive | None
) -> Chain:
    """Return the network: 11,175,818 parameters for 1 channel and 10 classes.

    It differs from `resnet18` in three things: every convolution has a bias, the shortcuts have no
    BatchNorm, and `init_std` applies to the weights only, so the biases keep torch's default
    initialisation.

    Raises:
        ConfigError: the images are smaller than 9x9 pixels, as in `resnet18`.
    """
    require_image_size("book_resnet18", image_size, 9)
    stem = nn.Sequential(nn.Conv2d(in_channels, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
    blocks: dict[str, nn.Module] = {}
    channels = 64
    for stage, (width, stride) in enumerate(STAGES, 1):
        blocks[f"layer{stage}_0"] = Residual(channels, width, stride)
        blocks[f"layer{stage}_1"] = Residual(width, width)
        channels = width
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
    model = Chain((in_channels, image_size, image_size), stem=stem, **blocks, head=head)
    if init_std is not None:
        model.initialize(partial(init_normal, std=init_std, zero_biases=False))
    return model
