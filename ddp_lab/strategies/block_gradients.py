"""Gradients of the blocks of a mesh: parameters unused on some ranks, and the order of the sums.

A mesh calls all of its blocks. Parameters within a block may be left out (unit_gradients.py). The
gradients of the blocks must then be summed in the same order on all ranks nevertheless.
"""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ddp_lab.strategies.unit_gradients import UnitGradients
from ddp_lab.strategies.unit_groups import groups_of
from ddp_lab.strategies.unit_order import SUM, WHOLE, UnitOrder


class BlockGradients(UnitGradients):
    """Gradients of the blocks of a stage, whose sums have the same order on all ranks.

    Args:
        stage: before it is sharded.
        order: of its blocks.
    """

    def __init__(self, stage: nn.Module, order: UnitOrder):
        super().__init__(stage, order.is_active)
        self.order = order
        self._names = {module: name or WHOLE for name, module in stage.named_modules()}

    def begin(self, has_samples: bool) -> None:
        """Begin a gradient-accumulation step. The argument is the attribute."""
        self.has_samples = has_samples
        self.order.begin(None)

    def complete(self, unit: nn.Module) -> None:
        if any(group.reduce_grads for group in groups_of(unit)):
            self.order.event(SUM + self._names[unit])
        super().complete(unit)


def need_gradient(block: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """Return a block's output so that it needs a gradient, also if no parameter was used.

    torch sums the gradients of a block after those of its inputs, but at the end of the backward
    pass if they need none. The ranks would sum in different orders if the blocks before it use
    parameters on some ranks only.
    """
    if not torch.is_grad_enabled():
        return output

    def of(tensor: torch.Tensor) -> torch.Tensor:
        has_fraction = tensor.is_floating_point() or tensor.is_complex()
        left_out = has_fraction and not tensor.requires_grad
        # not a leaf: it may be changed in place
        return tensor.detach().requires_grad_().clone() if left_out else tensor

    return tree_map_only(torch.Tensor, of, output)
