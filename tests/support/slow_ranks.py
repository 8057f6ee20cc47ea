"""Models and datasets that sleep on some rank, in phases that are counted in steps.

Each phase has PHASE steps. In every step each rank computes for BASE seconds; what a rank sleeps in
addition begins with a phase, and ends with it. It is MORE, and longer than a step takes without it:
where other programs make the steps longer, the rank is as much slower than the others.
"""

import os
import time

import torch
from torch import nn

PHASE = 60  # steps
BASE = 0.02  # seconds
MORE = 0.06  # seconds
BATCH = 6  # samples of all ranks
CYCLES = 30_000_000  # of a GPU, about 20 ms


class Nap:
    """Sleeps for MORE, or for three times as long as it is since the last nap, if that is longer.

    Half a second is the longest, as after the batches of an epoch.
    """

    def __init__(self):
        self.ended: float | None = None

    def __call__(self) -> None:
        step = time.perf_counter() - self.ended if self.ended else 0.0
        time.sleep(min(max(MORE, 3 * step), 0.5))
        self.ended = time.perf_counter()


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
        self.nap = Nap()

    def forward(self, inputs):
        if self.training and inputs.device.type != "meta":
            time.sleep(BASE)
            if is_slow(self.rank, self.phase, self.steps):
                self.nap()
            self.steps += 1
        return self.inner(inputs.flatten(1))


class Busy(nn.Module):
    """A linear layer before which the GPU is busy, twice as long on rank 1."""

    def __init__(self, in_channels, image_size, num_classes):
        super().__init__()
        self.inner = nn.Linear(in_channels * image_size**2, num_classes)

    def forward(self, inputs):
        if inputs.device.type == "cuda":
            torch.cuda._sleep(CYCLES)
            if os.environ.get("RANK") == "1":
                torch.cuda._sleep(CYCLES)
        return self.inner(inputs.flatten(1))


class Reading:
    """Images of which the first one of a step takes MORE to read on one rank in a phase.

    Args:
        split: train or val.
        rank, phase: that of which reading takes longer.
        steps: of an epoch.
        replicas: that divide a batch; None: all ranks.
        side: of an image, in pixels.
    """

    def __init__(self, split, rank=-1, phase=3, steps=5 * PHASE, replicas=None, side=4):
        self.split = split
        self.rank = rank
        self.phase = phase
        self.size = steps * BATCH if split == "train" else BATCH
        self.local_batch = BATCH // (replicas or int(os.environ.get("WORLD_SIZE", "1")))
        self.side = side
        self.read = 0
        self.nap = Nap()

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        steps, place = divmod(self.read, self.local_batch)
        if self.split == "train":
            self.read += 1
            if place == 0 and is_slow(self.rank, self.phase, steps):
                self.nap()
        return torch.full((1, self.side, self.side), index % 3 - 1.0), index % 2
