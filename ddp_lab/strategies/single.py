"""One device, one process: the reference whose weights every other strategy must reproduce."""

from torch import nn

from ddp_lab.strategies.base import ALL_PERFORMANCE_OPTIONS, Strategy
from ddp_lab.world.runtime import Runtime


class Single(Strategy):
    """Training on one device, without communication.

    Args:
        find_unused_parameters: whether steps may use some of the parameters only. Then those that
            the two samples of the trial do not use are not frozen, as under the strategies that
            need this key. The config does not list it, so that a strategy of the user without
            options can take the place of this one.
    """

    one_process = True
    supports_mps = True
    supports_own_steps = True
    computes_head_losses = True
    supported_options = ALL_PERFORMANCE_OPTIONS

    def __init__(self, runtime: Runtime, find_unused_parameters: bool = False):
        super().__init__(runtime)
        self.find_unused_parameters = find_unused_parameters
        if find_unused_parameters:
            from ddp_lab.strategies.unused import unsupported_with_unused

            self.unsupported |= unsupported_with_unused(self)

    def setup(self, model: nn.Module) -> None:
        self.module = self.to_device(model)
        self.forward = self.module
