"""model.init=by_block"""

import torch
from seeds import seed_of
from settings import SEED
from torch import nn


def reset(module: nn.Module) -> None:
    """Draw the weights of a module: by its own method, or by those of the modules in it."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    else:
        for child in module.children():
            reset(child)


def draw_by_block(model: nn.Module) -> None:
    """Draw the initial weights of each block of a model from a seed of its name.

    So they do not depend on the blocks before it. The first block comes last, because it decides
    about a weight that it shares with another.
    """
    for name, block in reversed(list(model.named_children())):
        torch.manual_seed(seed_of(f"init seed={SEED} block={name}"))
        reset(block)
