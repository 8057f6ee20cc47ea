"""One training step as a callable."""

import torch
from torch.nn.utils import clip_grads_with_norm_

from ddp_lab.data.loaders import Batch
from ddp_lab.strategies.base import Strategy


class Step:
    """Gradients of one global batch, one optimizer step, one step of the learning-rate schedule.

    Args:
        accumulate: in how many pieces each rank computes its share of the batch.
        max_grad_norm: the L2 norm over all parameters of the model that longer gradients are scaled down to; None: never.

    Attributes:
        lr: the learning rate of the last step taken.
    """

    def __init__(
        self,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
    ):
        self.strategy, self.optimizer, self.scheduler = strategy, optimizer, scheduler
        self.accumulate, self.max_grad_norm = accumulate, max_grad_norm

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Returns this rank's [loss_sum, correct, count], taken before the optimizer's step; does not wait for the device."""
        sums = self.strategy.forward_backward(*batch, self.accumulate)
        if self.max_grad_norm is not None:
            norm = self.strategy.gradient_norm()
            foreach = self.optimizer.param_groups[0].get("foreach")  # tp cannot have it
            clip_grads_with_norm_(self.strategy.parameters(), self.max_grad_norm, norm, foreach=foreach)
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return sums
