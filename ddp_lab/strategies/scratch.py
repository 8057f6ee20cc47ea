"""Data parallelism by hand, with nothing but `torch.distributed.broadcast` and `all_reduce`.

Every rank holds a whole copy of the model. One step:

    rank 0:  its part of the batch -> forward -> backward -> gradients --+
    rank 1:  its part of the batch -> forward -> backward -> gradients --+-- all_reduce: every rank gets the sum
    ...                                                                  |
    rank k:  its part of the batch -> forward -> backward -> gradients --+

and then every rank takes the same optimizer step from the same weights with the same gradients, so the copies stay equal
without ever being sent again.
"""

from typing import Literal

import torch
import torch.distributed as dist

from ddp_lab.models.chain import Chain
from ddp_lab.runtime import Runtime
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm


def all_reduce_per_tensor(gradients: list[torch.Tensor]) -> None:
    """One collective for each tensor, as the textbook does it. Each pays the latency: LeNet has 8 tensors, ResNet-18 62."""
    for gradient in gradients:
        dist.all_reduce(gradient)


def all_reduce_flat(gradients: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """One collective for all: the latency is paid once, for the price of copying every gradient out and back."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    parts = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])


ALGORITHMS = {"per_tensor": all_reduce_per_tensor, "flat": all_reduce_flat}


class Scratch(Strategy):
    """Data parallelism by hand.

    Args:
        algorithm: how the gradients are summed over the ranks.
        batch_norm: over what BatchNorm takes its statistics while training.
    """

    def __init__(self, runtime: Runtime, algorithm: Literal["per_tensor", "flat"], batch_norm: BatchNorm):
        super().__init__(runtime)
        self.all_reduce_gradients = ALGORITHMS[algorithm]
        self.batch_norm = batch_norm

    def setup(self, model: Chain) -> None:
        self.module = self.forward = set_batch_norm(model.to(self.device), self.batch_norm)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor, src=0)  # whatever a rank started with, all start as rank 0

    def reduce_gradients(self) -> None:
        # Each loss was divided by the GLOBAL count, so the gradient of the global mean is the plain sum over the ranks.
        self.all_reduce_gradients([parameter.grad for parameter in self.parameters()])
