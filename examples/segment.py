"""A loop of your own with a U-Net.

python examples/segment.py, or torchrun --nproc_per_node=2 examples/segment.py ddp.
"""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, random_split

from ddp_lab import Lab, tasks


class UNet(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.top = nn.Conv2d(1, width, 3, padding=1)
        self.bottom = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.up = nn.Conv2d(3 * width, width, 3, padding=1)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        top = self.top(images).relu()
        bottom = self.bottom(F.max_pool2d(top, 2)).relu()
        return self.head(self.up(torch.cat([top, F.interpolate(bottom, scale_factor=2)], 1)).relu())


def discs(samples: int = 250, size: int = 32) -> TensorDataset:
    """Return noisy images, [1, size, size], and masks, [size, size].

    A mask is 1 in a disc, 0 outside, 255 (ignored) at its edge.
    """
    places = torch.arange(size)
    (x, y, radius) = torch.rand(3, samples, 1, 1) * 8 + 8
    distance = ((places - x) ** 2 + (places[:, None] - y) ** 2).sqrt() - radius
    masks = torch.where(distance.abs() < 0.5, 255, (distance < 0).long())
    return TensorDataset(
        (distance < 0).float()[:, None] + 0.5 * torch.randn(samples, 1, size, size), masks
    )


with Lab(strategy=sys.argv[1] if len(sys.argv) > 1 else "single", seed=0) as lab:
    training, validation = random_split(discs(), [200, 50])
    trainer = lab.trainer(
        UNet(), tasks.Segmentation(), partial(torch.optim.AdamW, lr=1e-2), batch_size=16
    )
    for epoch in range(3):
        for images, masks in trainer.batches(training, epoch):
            loss = trainer.step(images, masks)
        lab.log(epoch=epoch + 1, train_loss=loss, **trainer.evaluate(validation))
