"""One stage of a pipeline, and the loss that its last stage computes."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from ddp_lab.strategies.activation_checkpointing import Checkpointing, checkpointed
from ddp_lab.strategies.loss import Loss
from ddp_lab.strategies.sums import sums


class Stage(nn.Sequential):
    """Consecutive blocks of the model.

    Args:
        blocks: the blocks by name.
        autocast: returns the context of the forward pass.
        dtype: dtype of the output, in which the next rank has allocated its receive buffers.
        checkpointing: which activations are computed again in the backward pass.
    """

    def __init__(
        self,
        blocks: OrderedDict[str, nn.Module],
        autocast: Callable[[], AbstractContextManager[object]],
        dtype: torch.dtype,
        checkpointing: Checkpointing,
    ):
        super().__init__(blocks)
        self.autocast, self.dtype = autocast, dtype
        self.checkpointing: Checkpointing = checkpointing

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            output = input
            for block in self:
                output = checkpointed(block, self.checkpointing)(output)
            output = output.to(self.dtype).contiguous()  # as sending requires
            # torch 2.11 cannot cut the backward pass of a stage in two if the stage returns its own input.
            return output.clone() if output is input else output


class MicroBatchLoss:
    """The loss that the schedule computes on the last stage, for each micro-batch.

    It is a class of its own and not a method of the strategy, because the schedule would keep the strategy alive.

    Args:
        loss: the training loss.

    Attributes:
        divisor: number that each summed loss is divided by.
        results: [loss_sum, correct, count] of each micro-batch so far.
    """

    def __init__(self, loss: Loss):
        self.loss = loss
        self.divisor = 1.0
        self.results: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.loss(logits, targets)
        self.results.append(sums(loss, logits, targets))
        return loss / self.divisor
