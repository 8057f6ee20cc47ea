"""What every strategy is: a working default for one device, of which each strategy changes a few lines."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ddp_lab.data.loaders import IGNORE
from ddp_lab.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.runtime import Runtime

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over the samples whose target is not IGNORE; 0 where there is none (a mean would be NaN)."""
    return F.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=IGNORE)


def sums(loss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[loss_sum, correct, count] in float64, on the device: sums add over steps and ranks, and divide once, on the host."""
    correct = (logits.argmax(1) == targets).sum()
    count = (targets != IGNORE).sum()
    return torch.stack([loss.detach().double(), correct.double(), count.double()])


class Strategy(ABC):
    """One way of spreading a training step over devices.

    Constructed before the data (it decides which share of a batch this rank reads), set up after the model, in an open
    process group unless `one_process`. The optimizer is made from `parameters()` after that.

    Attributes:
        module: the whole model, unwrapped, so that its parameters keep their plain names.
        forward: what computes the logits, `module` or a wrapper around it; for the defaults of this class.
        device: where this rank's batches are wanted.
        replicas: how many copies of the model share a global batch.
        num_devices: how many devices work, over all ranks.

    Raises:
        ConfigError: a one-process strategy was started with several ranks.
    """

    one_process: ClassVar[bool] = False

    module: Chain
    forward: nn.Module

    def __init__(self, runtime: Runtime):
        if self.one_process and runtime.world_size > 1:
            raise ConfigError(
                f"strategy={self.name}: runs in one process, but {runtime.world_size} ranks were started. Start "
                f"`python train.py strategy={self.name}`, or take a strategy of several processes: scratch or ddp"
            )
        self.runtime = runtime
        self.device = runtime.device
        self.dp_rank, self.dp_size = runtime.rank, runtime.world_size
        self.replicas = self.num_devices = runtime.world_size

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @abstractmethod
    def setup(self, model: Chain) -> None:
        """Places, wraps or cuts `model` (on the CPU, the same on every rank)."""

    def describe(self) -> str:
        """One line for the log: what is where. After setup."""
        return f"{self.name} on {self.where}"

    @property
    def where(self) -> str:
        """The devices in words: how many of which kind."""
        kind = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return f"{self.num_devices} x {kind}"

    def backward(self, loss: torch.Tensor) -> None:
        """Leaves the gradient of the GLOBAL mean in `.grad`. `loss` is this rank's part: its sum over the global count."""
        loss.backward()

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
        """One batch's gradient, of the mean loss over all `count` samples of the GLOBAL batch.

        Args:
            inputs, targets: this rank's share, [b, channels, height, width] and [b].

        Returns:
            This rank's [loss_sum, correct, count].
        """
        with self.runtime.autocast():
            logits = self.forward(inputs)
            loss = loss_sum(logits, targets)
        self.backward(loss / count)
        return sums(loss, logits, targets)

    @torch.no_grad()
    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits [b, classes] of this rank's share, without a gradient."""
        with self.runtime.autocast():
            return self.forward(inputs)

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """This rank's [loss_sum, correct, count], without a gradient."""
        logits = self.predict(inputs)
        return sums(loss_sum(logits, targets), logits, targets)

    def total(self, sums: torch.Tensor) -> list[float]:
        """The sums over all ranks, on the host. Waits for the device: call it once an epoch."""
        return self.runtime.all_reduce(sums).tolist()

    def train(self, mode: bool = True) -> None:
        """Switches between training and evaluation.

        BatchNorm's running statistics are each replica's own while training; leaving it, all get replica 0's, so that
        one model is evaluated and saved.
        """
        self.module.train(mode)
        if not mode and self.dp_size > 1:
            for buffer in self.module.buffers():
                self.runtime.broadcast(buffer)

    def parameters(self) -> Iterator[nn.Parameter]:
        """For the optimizer, after setup."""
        return self.module.parameters()

    def state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole model and optimizer by plain names, on the CPU. Collective; complete on rank 0, maybe empty elsewhere."""
        model, optim = get_state_dict(self.module, optimizer, options=WHOLE)
        return {"model": model, "optimizer": optim}

    def load_state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads what any strategy's `state_dict` returned; every rank has the whole of it. Collective."""
        set_state_dict(
            self.module,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=WHOLE,
        )
