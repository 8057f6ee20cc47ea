"""Models and datasets that sleep on some rank, in phases that are counted in steps.

Each phase has PHASE steps. In every step each rank computes for BASE seconds; what a rank sleeps in
addition begins with a phase, and ends with it.
"""

import os
import time

import torch
from torch import nn

PHASE = 60  # steps
BASE = 0.02  # seconds
MORE = 0.06  # seconds
BATCH = 6  # samples of all ranks


def is_slow(rank: int, phase: int, steps: int) -> bool:
    """Return whether this rank is the slow one in a step, by the steps before it."""
    return int(os.environ.get("RANK", "0")) == rank and steps // PHASE == phase


class Sleeping(nn.Module):
    """A linear layer that takes BASE, and MORE on one rank in a phase; with -1 on no rank."""

    def __init__(self, in_channels, image_size, num_classes, rank: int = -1, phase: int = 1):
        super().__init__()
        self.inner = nn.Linear(in_channels * image_size**2, num_classes)
        self.rank = rank
        self.phase = phase
        self.steps = 0

    def forward(self, inputs):
        if self.training and inputs.device.type != "meta":
            time.sleep(BASE)
            if is_slow(self.rank, self.phase, self.steps):
                time.sleep(MORE)
            self.steps += 1
        return self.inner(inputs.flatten(1))


class Reading:
    """Images of which the first one of a step takes MORE to read on one rank in a phase."""

    def __init__(self, split, rank: int = -1, phase: int = 3, steps: int = 5 * PHASE):
        self.size = steps * BATCH if split == "train" else BATCH
        self.split = split
        self.rank = rank
        self.phase = phase
        self.read = 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        of_rank = BATCH // int(os.environ.get("WORLD_SIZE", "1"))
        steps, place = divmod(self.read, of_rank)
        if self.split == "train":
            self.read += 1
            if place == 0 and is_slow(self.rank, self.phase, steps):
                time.sleep(MORE)
        image = torch.arange(16.0).reshape(1, 4, 4) + index % 3
        return image, index % 2
