"""Strategies with faults that `inject` cannot produce."""

import time

import torch
import torch.distributed as dist

from ddp_lab.strategies.ddp import DDP


class Drifting(DDP):
    """DDP in which one weight of rank 1 changes before step 7, as by a flipped bit."""

    steps = 0

    def forward_backward(self, inputs, targets, global_size, accumulate=1):
        self.steps += 1
        if self.dp_rank == 1 and self.steps == 7:
            with torch.no_grad():
                self.module.head[1].bias[3] += 1e-7
        return super().forward_backward(inputs, targets, global_size, accumulate)


class Straggling(DDP):
    """DDP in which rank 1 sleeps before every step, as on a slower machine."""

    def forward_backward(self, inputs, targets, global_size, accumulate=1):
        if self.dp_rank == 1:
            time.sleep(0.1)
        return super().forward_backward(inputs, targets, global_size, accumulate)


class Skipping(DDP):
    """DDP in which rank 1 skips an all-reduce of the other ranks after step 8.

    Args:
        shared: whether it is one of the group of the gradients, whose next all-reduce has another
            shape.
        seconds: for which both ranks sleep before each step. From about half a second on they
            exchange their sums after each step.
    """

    steps = 0

    def __init__(
        self,
        runtime,
        batch_norm,
        bucket_cap_mb,
        find_unused_parameters,
        shared=False,
        seconds=0.0,
    ):
        super().__init__(runtime, batch_norm, bucket_cap_mb, find_unused_parameters)
        self.shared = shared
        self.seconds = seconds

    def setup(self, model):
        super().setup(model)
        self.own_group = None if self.shared else dist.new_group()

    def forward_backward(self, inputs, targets, global_size, accumulate=1):
        time.sleep(self.seconds)
        loss = super().forward_backward(inputs, targets, global_size, accumulate)
        self.steps += 1
        if self.steps != 8 or self.dp_rank != 1:
            dist.all_reduce(torch.ones(7, device=self.device), group=self.own_group)
        return loss
