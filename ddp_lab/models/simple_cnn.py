"""The smallest convolutional network: one convolution and one linear layer, for quick tests."""

from torch import nn

from ddp_lab.models.chain import Chain, require_image_size


def simple_cnn(in_channels: int, image_size: int, num_classes: int) -> Chain:
    """Return the network: a 3x3 convolution of 16 channels, ReLU, max-pooling by 2, a linear layer.

    The weights have torch's default initialisation.

    Raises:
        ConfigError: the images are smaller than 2x2 pixels.
    """
    require_image_size("simple_cnn", image_size, 2)
    return Chain(
        (in_channels, image_size, image_size),
        conv=nn.Sequential(nn.Conv2d(in_channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        head=nn.Sequential(nn.Flatten(), nn.Linear(16 * (image_size // 2) ** 2, num_classes)),
    )
