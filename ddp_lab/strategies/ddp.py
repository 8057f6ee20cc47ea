"""torch's DistributedDataParallel: what scratch.py does, with the communication hidden behind the backward pass."""

from contextlib import AbstractContextManager

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_lab.models.chain import Chain
from ddp_lab.runtime import Runtime
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm


class DDP(Strategy):
    """DistributedDataParallel.

    Args:
        batch_norm: over what BatchNorm takes its statistics while training.
    """

    def __init__(self, runtime: Runtime, batch_norm: BatchNorm):
        super().__init__(runtime)
        self.batch_norm = batch_norm

    def setup(self, model: Chain) -> None:
        self.module = set_batch_norm(model.to(self.device), self.batch_norm)
        device_ids = [self.device] if self.device.type == "cuda" else None
        self.forward = DistributedDataParallel(self.module, device_ids=device_ids)
        self.forward.broadcast_buffers = False  # they travel when training is left (Strategy.train), not at every step
        self._settle_buckets(model)

    def _settle_buckets(self, model: Chain) -> None:
        """DDP lays out its buckets anew after its first backward, in the order that gradients came in. With more than two ranks
        that changes the order of addition: a resumed run's first step would be another in its last bits than the same step
        of a run that was not stopped. So the first backward is one that does not count."""
        model.eval()
        with self.autocast():
            logits = self.forward(torch.zeros(1, *model.input_shape, device=self.device))
        logits.sum().backward()
        model.train()
        for parameter in model.parameters():
            parameter.grad = None

    def divisor(self, count: int) -> float:
        return count / self.dp_size  # DDP averages over the ranks; the parts of the global mean are to be summed

    def no_sync(self) -> AbstractContextManager:
        return self.forward.no_sync()
