"""One device, one process: the reference that every other strategy must equal."""

from ddp_lab.models.chain import Chain
from ddp_lab.strategies.base import Strategy


class Single(Strategy):
    one_process = True

    def setup(self, model: Chain) -> None:
        self.module = self.forward = model.to(self.device)
