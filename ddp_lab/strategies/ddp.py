"""torch's DistributedDataParallel: what scratch.py does, with the communication hidden behind the backward pass."""

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_lab.models.chain import Chain
from ddp_lab.strategies.base import Strategy


class DDP(Strategy):
    def setup(self, model: Chain) -> None:
        self.module = model.to(self.device)
        device_ids = [self.device] if self.device.type == "cuda" else None
        self.forward = DistributedDataParallel(self.module, device_ids=device_ids)
        self.forward.broadcast_buffers = False  # they travel when training is left (Strategy.train), not at every step

    def backward(self, loss: torch.Tensor) -> None:
        (loss * self.dp_size).backward()  # DDP averages over the ranks; the parts of the global mean are to be summed
