"""nn.DataParallel: one process with one thread per GPU. The historical baseline, slower than DDP.

Every step copies the model from the first GPU to the others, scatters the batch, gathers the logits
on the first GPU and sums the gradients there. All threads share the lock of one Python interpreter.
"""

from torch import nn

from ddp_lab.config.types import DeviceName
from ddp_lab.strategies.base import Strategy
from ddp_lab.world.device import find_device
from ddp_lab.world.runtime import Runtime


class DP(Strategy):
    """Data parallelism in one process by nn.DataParallel.

    Args:
        devices: GPUs to use, of which the first holds the model; null uses all GPUs that `device`
            allows. Without a GPU there is one replica, on the CPU.
    """

    one_process = True
    supports_own_steps = True
    supported_options = frozenset({"channels_last", "fused"})

    def __init__(self, runtime: Runtime, devices: list[DeviceName] | None):
        super().__init__(runtime)
        if devices:
            self.devices = [find_device(name, "strategy.devices") for name in devices]
        else:
            self.devices = runtime.devices
        self.device = self.devices[0]
        if self.device.type == "cpu":
            self.devices = [self.device]  # one replica, even if the CPU is listed several times
        self.num_devices = len(self.devices)
        self.replicas = self.num_devices
        self.copies_weights = self.replicas > 1

    def setup(self, model: nn.Module) -> None:
        self.module = self.to_device(model)
        if self.device.type == "cuda":
            self.forward = nn.DataParallel(self.module, self.devices)
        else:
            self.forward = self.module

    def describe(self) -> str:
        if self.device.type == "cpu":
            return "dp on the CPU: no GPU is available, so one replica runs without nn.DataParallel"
        return (
            "dp: one process, nn.DataParallel over "
            f"{', '.join(str(device) for device in self.devices)}"
        )
