"""Activation checkpointing: most activations are not kept for the backward pass, which computes them again.

none       every layer's activations are kept
block      only each block's input is kept; the backward pass computes the block's forward pass again (Chen et al. 2016,
           arXiv:1604.06174), which costs about a third of a step
selective  also the results of matrix multiplications, attention and collectives are kept, so that only the inexpensive rest is
           computed again, such as normalizations and activation functions
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Checkpointing = Literal["none", "block", "selective"]
Run = Callable[[torch.Tensor], torch.Tensor]

KEPT = {  # operations whose results `selective` keeps, by library
    "aten": """mm addmm bmm baddbmm convolution _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_cudnn_attention
        _scaled_dot_product_fused_attention_overrideable""",
    "_c10d_functional": "all_reduce all_gather_into_tensor reduce_scatter_tensor",
}


@cache
def kept() -> list[Any]:
    """Return these operations."""
    return [getattr(getattr(torch.ops, library), name).default for library, names in KEPT.items() for name in names.split()]


def checkpointed(block: nn.Module, mode: Checkpointing) -> Run:
    """Return what to call in place of a block. The block itself and its names stay the same."""
    if mode == "none":
        return block
    if mode == "block":
        return partial(checkpoint, block, use_reentrant=False)
    return partial(checkpoint, block, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, kept()))
