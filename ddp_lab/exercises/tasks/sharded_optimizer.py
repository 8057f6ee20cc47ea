"""Shard the optimizer: ZeRO stage 1.

With momentum an optimizer keeps one more number for each weight, with Adam two, and every rank
keeps the same. In ZeRO-1 (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models") each rank keeps the state of its own part of the parameters, updates
only that part, and sends the new weights to the others.

    parameters    p0 p1 p2 p3 p4      rank 0 owns p0 p2 p4, rank 1 owns p1 p3
"""

import torch
import torch.distributed as dist
from torch import nn


class ShardedSGD:
    """Stochastic gradient descent with momentum, whose state is sharded over the ranks.

    Args:
        parameters: the same on all ranks, in the same order. Parameter i belongs to rank i %
            world_size.
        lr: learning rate.
        momentum: the momentum buffer becomes momentum * buffer + gradient; lr * buffer is
            subtracted from the weight.

    Attributes:
        buffers: the momentum buffers by the parameter's index, of this rank's parameters only.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float):
        self.parameters = parameters
        self.lr = lr
        self.momentum = momentum
        indices = range(dist.get_rank(), len(parameters), dist.get_world_size())
        self.buffers = {index: torch.zeros_like(parameters[index]) for index in indices}

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters. Their gradients are summed over the ranks already. Collective."""
        for index, buffer in self.buffers.items():
            parameter = self.parameters[index]
            buffer.mul_(self.momentum).add_(parameter.grad)
            parameter.sub_(self.lr * buffer)
        for index, parameter in enumerate(self.parameters):
            dist.broadcast(parameter, src=index % dist.get_world_size())
