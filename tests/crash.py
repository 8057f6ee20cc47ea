"""Strategies with faults that cannot be injected from outside."""

import torch

from ddp_lab.strategies.ddp import DDP


class Lazy(DDP):
    """Rank 1 takes part in every third step only, as by a bug that makes its epochs shorter than the others'."""

    steps = 0

    def forward_backward(self, inputs, targets, count, accumulate=1):
        self.steps += 1
        if self.dp_rank == 1 and self.steps > 6 and self.steps % 3:
            for parameter in self.parameters():
                parameter.grad = torch.zeros_like(parameter)
            return torch.zeros(3, dtype=torch.float64)
        return super().forward_backward(inputs, targets, count, accumulate)
