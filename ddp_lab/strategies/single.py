"""One device, one process: the reference that every other strategy must equal."""

from ddp_lab.models.chain import Chain
from ddp_lab.strategies.base import ALL_LEVERS, Strategy


class Single(Strategy):
    one_process = supports_mps = True
    levers = ALL_LEVERS

    def setup(self, model: Chain) -> None:
        self.module = self.forward = model.to(self.device)
