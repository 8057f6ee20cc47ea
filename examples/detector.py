"""Boxes around several discs: targets of different lengths, and a loss that is a sum and a weight.

python examples/detector.py, or torchrun --nproc_per_node=2 examples/detector.py ddp.
"""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from ddp_lab import Lab

SIZE = 32
CELLS = 4  # an image is divided into 4 x 4 cells, each of which finds one disc


class Discs(Dataset):
    """Images, [1, 32, 32], with one to three discs: (cell, x, y, radius) of each, [n, 4]."""

    def __init__(self, samples: int):
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        cells = torch.randperm(CELLS**2, generator=draw)[: 1 + index % 3]
        (x, y, radius) = torch.rand(3, len(cells), generator=draw)
        center = torch.stack([cells % CELLS + x, cells // CELLS + y], 1) * SIZE / CELLS
        places = torch.cartesian_prod(torch.arange(SIZE), torch.arange(SIZE)).flip(1)
        distance = (places[:, None] - center).norm(dim=2) - (2 + 2 * radius)
        image = (distance.amin(1) < 0).float().view(1, SIZE, SIZE)
        return image, torch.stack([cells, x, y, radius], 1)


def collate(samples: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad the discs of each image to three, by those of a cell -1."""
    images, discs = zip(*samples, strict=True)
    padded = [F.pad(each, (0, 0, 0, 3 - len(each)), value=-1) for each in discs]
    return torch.stack(images), torch.stack(padded)


def loss(outputs: torch.Tensor, discs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of all discs, and their number."""
    cell = discs[..., :1].long()
    of_cells = outputs.flatten(2).transpose(1, 2)  # [b, cells, 3]
    predicted = of_cells.gather(1, cell.clamp(min=0).expand(-1, -1, 3))
    errors = (predicted - discs[..., 1:]).square().sum(2)
    is_disc = (cell[..., 0] >= 0).float()
    return (errors * is_disc).sum(), is_disc.sum()


with Lab(strategy=sys.argv[1] if len(sys.argv) > 1 else "single", seed=0) as lab:
    layers = [nn.Conv2d(1, 16, 8, stride=4, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(32, 3, 4, stride=2, padding=1))
    trainer = lab.trainer(
        model, loss, partial(torch.optim.AdamW, lr=5e-3), batch_size=20, collate_fn=collate
    )
    for epoch in range(3):
        for images, discs in trainer.batches(Discs(400), epoch):
            trainer.step(images, discs)
    lab.log(epoch=3, **trainer.evaluate(Discs(400)))
