"""A model of one's own: plain PyTorch, without ddp_lab."""

import torch
from torch import nn


class MyNet(nn.Module):
    """A small convolutional network with a residual connection."""

    def __init__(self, in_channels: int, num_classes: int, width: int = 16):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, width, 3, stride=2, padding=1)
        self.block = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width * 16, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images).relu()
        x = (x + self.block(x)).relu()
        return self.head(nn.functional.adaptive_avg_pool2d(x, 4).flatten(1))
