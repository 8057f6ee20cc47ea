"""One training step as a callable."""

import torch

from ddp_lab.data.loaders import Batch
from ddp_lab.strategies.base import Strategy


class Step:
    """Gradients of one global batch, one optimizer step, one step of the learning-rate schedule.

    Attributes:
        lr: the learning rate of the last step taken.
    """

    def __init__(
        self,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
    ):
        self.strategy, self.optimizer, self.scheduler = strategy, optimizer, scheduler

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Returns this rank's [loss_sum, correct, count], taken before the optimizer's step; does not wait for the device."""
        sums = self.strategy.forward_backward(*batch)
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return sums
