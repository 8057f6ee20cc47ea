"""Calls of a model by a loop of the user that its strategy does not see.

A wrapper such as DistributedDataParallel sums the gradients of its own calls only.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddp_lab.config.errors import TrainingError


@dataclass
class Passes:
    """Passes of a model by its strategy.

    Attributes:
        under_way: their number.
    """

    under_way: int = 0


class BareCalls:
    """Refuses calls of the model that the strategy does not see: a hook on the model.

    Args:
        strategy: its name, for the message.
        passes: of the strategy that are under way.
    """

    def __init__(self, strategy: str, passes: Passes):
        self.strategy = strategy
        self.passes = passes

    def __deepcopy__(self, memo: object) -> "BareCalls":
        """Return a hook that allows all calls: a copy of the model belongs to the user."""
        return BareCalls(self.strategy, Passes(under_way=1))

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Raise a TrainingError if a loop calls the model, in training and with gradients."""
        if not self.passes.under_way and module.training and torch.is_grad_enabled():
            raise TrainingError(
                f"strategy={self.strategy}: the model was called directly in training, so its "
                "gradients would not be summed over the ranks. Use trainer.forward(inputs), then "
                "trainer.backward(loss_sum, weight) and trainer.update(); or trainer.step(inputs, "
                "targets); or torch.no_grad(), if no gradient is needed"
            )
