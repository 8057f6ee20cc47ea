"""Models and datasets of a user for `ddp-lab eject`."""

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


class Points(torch.utils.data.Dataset):
    """Random points with four features, whose class is the number of their largest one.

    With `noise` a sample is another one in each epoch.
    """

    classes = ("a", "b", "c", "d")

    def __init__(self, split: str, number: int = 50, noise: float = 0.0):
        generator = torch.Generator().manual_seed(len(split))
        self.features = torch.randn(number, 4, generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        features = self.features[index]
        return features + self.noise * torch.randn(4), int(features.argmax())


def dense(input_shape, num_classes: int) -> nn.Sequential:
    """Return two linear layers."""
    return nn.Sequential(nn.Linear(input_shape[0], 8), nn.ReLU(), nn.Linear(8, num_classes))
