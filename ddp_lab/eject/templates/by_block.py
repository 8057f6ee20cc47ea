"""model.init=by_block"""

import torch
from seeds import seed_of
from settings import BLOCKS_RESET, SEED
from torch import nn


def reset(module: nn.Module) -> None:
    """Draw the weights of a module: by its own method, or by those of the modules in it."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    else:
        for child in module.children():
            reset(child)


def draw_by_block(model: nn.Module) -> None:
    """Draw the weights of each block by a seed of its name; the first one decides shared ones."""
    for name, block in reversed(list(model.named_children())):
        torch.manual_seed(seed_of(f"init seed={SEED} block={name}"))
        if BLOCKS_RESET:
            block.reset_parameters()
        else:
            reset(block)
