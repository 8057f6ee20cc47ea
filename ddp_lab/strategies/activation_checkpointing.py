"""Activation checkpointing: most activations are not kept for the backward pass, which computes them again.

none   every layer's activations are kept
block  only each block's input is kept; the backward pass computes the block's forward pass again (Chen et al. 2016,
       arXiv:1604.06174), which costs about a third of a step
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Checkpointing = Literal["none", "block"]
Run = Callable[[torch.Tensor], torch.Tensor]


def checkpointed(block: nn.Module, mode: Checkpointing) -> Run:
    """Return what to call in place of a block. The block itself and its names stay the same."""
    return block if mode == "none" else partial(checkpoint, block, use_reentrant=False)
