"""Models of a user for `ddp-lab eject`: with dropout and BatchNorm, a class and a function."""

import torch
from torch import nn


class Dropping(nn.Module):
    """A convolution with BatchNorm, dropout and a linear layer."""

    def __init__(self, in_channels: int, num_classes: int, width: int = 4):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.conv(images)).relu().mean((2, 3))
        return self.head(self.drop(features))


def dropping(in_channels: int, num_classes: int, width: int) -> nn.Sequential:
    """Return the same layers as a sequence."""
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(width * 64, num_classes),
    )


def frozen(num_classes: int) -> nn.Sequential:
    """Return layers of which the first is frozen."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, num_classes))
    model[0].requires_grad_(False)
    return model


def lazy(num_classes: int) -> nn.Sequential:
    """Return layers of which the last has no shape yet."""
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
