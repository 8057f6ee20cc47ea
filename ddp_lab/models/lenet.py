"""The LeNet of Dive into Deep Learning, section 13.5 (multi-GPU training from scratch).

It has two convolutions with average pooling and two linear layers, with ReLU in between.
"""

from functools import partial

from torch import nn

from ddp_lab.config.types import Positive
from ddp_lab.models.chain import Chain, init_normal, require_image_size


def lenet(in_channels: int, image_size: int, num_classes: int, init_std: Positive | None) -> Chain:
    """Return the network: 129,068 parameters for 1x28x28 images of 10 classes.

    Raises:
        ConfigError: the images are smaller than 14x14 pixels, too small for the two convolutions
            and poolings.
    """
    require_image_size("lenet", image_size, 14)
    side = ((image_size - 2) // 2 - 4) // 2
    model = Chain(
        (in_channels, image_size, image_size),
        conv1=nn.Sequential(nn.Conv2d(in_channels, 20, 3), nn.ReLU(), nn.AvgPool2d(2)),
        conv2=nn.Sequential(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2)),
        fc1=nn.Sequential(nn.Flatten(), nn.Linear(50 * side * side, 128), nn.ReLU()),
        fc2=nn.Linear(128, num_classes),
    )
    if init_std is not None:
        model.initialize(partial(init_normal, std=init_std))
    return model
