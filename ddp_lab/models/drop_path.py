"""Stochastic depth: residual branches that are dropped at random in training.

As in its paper (Huang et al. 2016, arXiv:1603.09382), a branch is dropped for a complete batch.
Which ones depends only on the seed, the number of the step and the branch's name. It is therefore
the same for any strategy, number of ranks and size of micro-batches, and after a resume. To drop it
for each sample separately, as timm does, a block would have to know which samples of the global
batch it gets.
"""

import hashlib
from collections.abc import Iterable
from random import Random

import torch
from torch import nn


class DropPath(nn.Module):
    """The end of a residual branch.

    In training the branch is dropped, or scaled so that its mean stays the same.

    Args:
        rate: probability of being dropped, below 1.
        name: a name that no other branch of the model has.

    Attributes:
        scale: 0 or 1 / (1 - rate), [], on the device of the branch; None before the first step,
            when nothing is dropped.
    """

    drops_by_step = True  # a training step draws whether it drops the branch

    def __init__(self, rate: float, name: str):
        super().__init__()
        self.rate = rate
        self.name = name
        self.scale: torch.Tensor | None = None  # no buffer: it is neither saved nor sent

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        """Return the branch, scaled in training."""
        if not self.training or self.scale is None:
            return branch
        # the replicas of nn.DataParallel share the scale on the first device
        return branch * self.scale.to(branch.device)

    def draw(self, seed: int, step: int) -> float:
        """Return the scale in a step."""
        digest = hashlib.sha256(
            f"drop_path seed={seed} step={step} branch={self.name}".encode()
        ).digest()
        if Random(int.from_bytes(digest, "big")).random() < self.rate:
            return 0.0
        return 1 / (1 - self.rate)

    def prepare(self, seed: int, step: int) -> None:
        """Draw whether a step, numbered from the beginning of the run, drops the branch."""
        if self.scale is not None:
            self.scale.fill_(self.draw(seed, step))  # in place: a CUDA graph reads it


def drop_paths_of(modules: Iterable[nn.Module]) -> list[DropPath]:
    """Return the branches of modules that can be dropped, each with its scale.

    A scale is on the device of the module that the branch belongs to.
    """
    branches: list[DropPath] = []
    for module in modules:
        for layer in module.children():
            if isinstance(layer, DropPath):
                layer.scale = torch.ones((), device=next(module.parameters()).device)
                branches.append(layer)
    return branches
