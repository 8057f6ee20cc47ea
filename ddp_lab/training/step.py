"""One training step as a callable."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn.utils import clip_grads_with_norm_

from ddp_lab.data.sharding import Batch, Loader
from ddp_lab.strategies.base import Strategy, local
from ddp_lab.training.tally import Tally


@runtime_checkable
class TrainStep(Protocol):
    """What the training loop needs of a step. `Step` and `GraphStep` compute one; `Fault` and `Profiled` wrap another.

    Attributes:
        tally: of the losses, taken before the optimizer's step.
        lr: the learning rate of the last step taken.
    """

    @property
    def tally(self) -> Tally: ...

    @property
    def lr(self) -> float: ...

    def batches(self, loader: Loader) -> Iterable[Any]:
        """Return what the calls are to be given, one after the other, for the rest of the epoch."""

    def __call__(self, batch: Any) -> None:
        """Take one step, without waiting for the device."""


class Step:
    """Gradients of one global batch, one optimizer step, one step of the learning-rate schedule.

    Args:
        accumulate: in how many pieces each rank computes its share of the batch.
        max_grad_norm: the L2 norm over all parameters of the model that longer gradients are scaled down to; None: never.
        skip_not_finite: a batch whose gradient is not finite counts as one with a gradient of zeros.

    Attributes:
        tally: of the losses, taken before the optimizer's step.
        lr: the learning rate of the last step taken.
    """

    def __init__(
        self,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        skip_not_finite: bool = False,
    ):
        self.strategy, self.optimizer, self.scheduler = strategy, optimizer, scheduler
        self.accumulate, self.max_grad_norm, self.skip_not_finite = accumulate, max_grad_norm, skip_not_finite
        self.tally = Tally(strategy.device, skip_not_finite)
        self._optimize = optimizer.step
        self.lr = 0.0

    def compile(self, fuse: Callable) -> None:
        """Compile what follows the gradients: the optimizer's step, by torch.compile alone, and the tally, by `fuse`. For a
        step whose learning rate is a tensor; a number would have the optimizer compiled anew at every step."""
        self._optimize = torch.compile(self.optimizer.step)
        self.tally.compile(fuse)

    def batches(self, loader: Loader) -> Iterable[Batch]:
        """What a call is to be given, one after the other, for the rest of the epoch."""
        return loader

    def gather(self, batch: Batch) -> Batch:
        """Return the tensors of what `batches` yields: here it has them already."""
        return batch

    def __call__(self, batch: Batch) -> None:
        """Does not wait for the device."""
        self.compute(batch)
        self.advance()

    def compute(self, batch: Batch) -> None:
        """What the device does in a step: all that a CUDA graph of it holds."""
        buffers = [buffer.clone() for buffer in self.strategy.module.buffers()] if self.skip_not_finite else []
        sums = self.strategy.forward_backward(*batch, self.accumulate)
        if self.max_grad_norm is not None or self.skip_not_finite:
            norm = self.strategy.gradient_norm()
            if self.skip_not_finite:
                self._drop_unless(norm.isfinite(), buffers)
            if self.max_grad_norm is not None:
                foreach = self.optimizer.param_groups[0].get("foreach")  # tp cannot have it
                clip_grads_with_norm_(self.strategy.parameters(), self.max_grad_norm, norm.nan_to_num(), foreach=foreach)
        self._optimize()
        self.optimizer.zero_grad()
        self.tally.add(sums)

    def advance(self) -> None:
        """What the host does: the learning rate of the next step."""
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step()

    def _drop_unless(self, finite: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        """Leaves no trace of the batch in gradients and BatchNorm's statistics, on every rank alike: the norm is the whole
        model's. Decided on the device, without waiting for it."""
        for parameter in self.strategy.parameters():
            gradient = local(parameter.grad)
            gradient.copy_(torch.where(finite.to(gradient.device, non_blocking=True), gradient, 0))
        for buffer, before in zip(self.strategy.module.buffers(), buffers, strict=True):
            buffer.copy_(torch.where(finite.to(buffer.device, non_blocking=True), buffer, before))
