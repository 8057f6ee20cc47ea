"""One device, one process: the reference whose weights every other strategy must reproduce."""

from torch import nn

from ddp_lab.strategies.base import ALL_PERFORMANCE_OPTIONS, Strategy
from ddp_lab.strategies.sharding import to_device
from ddp_lab.world.runtime import Runtime


class Single(Strategy):
    """Training on one device, without communication."""

    one_process = supports_mps = True
    performance_options = ALL_PERFORMANCE_OPTIONS

    def __init__(self, runtime: Runtime):
        super().__init__(runtime)

    def setup(self, model: nn.Module) -> None:
        self.module = self.forward = to_device(model, self.device, self.initial_weights)
