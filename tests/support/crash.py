"""Strategies with faults that `inject` cannot produce."""

import time

import torch

from ddp_lab.strategies.ddp import DDP


class Drifting(DDP):
    """DDP in which one weight of rank 1 changes before step 7, as by a flipped bit."""

    steps = 0

    def forward_backward(self, inputs, targets, count, accumulate=1):
        self.steps += 1
        if self.dp_rank == 1 and self.steps == 7:
            with torch.no_grad():
                self.module.head[1].bias[3] += 1e-7
        return super().forward_backward(inputs, targets, count, accumulate)


class Straggling(DDP):
    """DDP in which rank 1 sleeps before every step, as on a slower machine."""

    def forward_backward(self, inputs, targets, count, accumulate=1):
        if self.dp_rank == 1:
            time.sleep(0.1)
        return super().forward_backward(inputs, targets, count, accumulate)
