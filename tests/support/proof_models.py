"""Models for proofs: with layers that a comparison must take into account."""

import torch
from torch import nn


class Images(nn.Module):
    """A base class: the pixels of an image, flattened, and a head."""

    def __init__(self, num_classes: int, image_size: int, in_channels: int):
        super().__init__()
        self.first = nn.Linear(in_channels * image_size**2, 8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.first(images.flatten(1))))

    def middle(self, values: torch.Tensor) -> torch.Tensor:
        return values.tanh()


class WithDropout(Images):
    """Drops units, which each rank draws by itself."""

    def __init__(self, num_classes: int, image_size: int, in_channels: int):
        super().__init__(num_classes, image_size, in_channels)
        self.drop = nn.Dropout(0.5)

    def middle(self, values: torch.Tensor) -> torch.Tensor:
        return self.drop(values)


class Float32Inside(Images):
    """Computes a layer in float32, whatever the dtype of its inputs is."""

    def __init__(self, num_classes: int, image_size: int, in_channels: int):
        super().__init__(num_classes, image_size, in_channels)
        self.inner = nn.Linear(8, 8, bias=False)

    def middle(self, values: torch.Tensor) -> torch.Tensor:
        mixed = nn.functional.linear(values.float(), self.inner.weight.float())
        return mixed.tanh().to(values.dtype)


class Float32Only(Images):
    """Has a layer whose dtype is float32, which takes no others."""

    def __init__(self, num_classes: int, image_size: int, in_channels: int):
        super().__init__(num_classes, image_size, in_channels)
        self.first = nn.Linear(in_channels * image_size**2, 8, dtype=torch.float32)


class Draws(Images):
    """Adds noise that no attribute turns off."""

    def middle(self, values: torch.Tensor) -> torch.Tensor:
        return values + torch.randn_like(values)


class Normalized(Images):
    """Has BatchNorm."""

    def __init__(self, num_classes: int, image_size: int, in_channels: int):
        super().__init__(num_classes, image_size, in_channels)
        self.norm = nn.BatchNorm1d(8)

    def middle(self, values: torch.Tensor) -> torch.Tensor:
        return self.norm(values)
