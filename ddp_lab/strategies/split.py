"""The model cut into stages in one process: stage k on device k, activations copied between them.

With one large batch, only one device works at a time. The batch is therefore divided into
micro-batches:

    device 0 | f1 f2 f3 f4             b4 b3 b2 b1
    device 1 |    f1 f2 f3 f4       b4 b3 b2 b1
             +----------------------------------------> time

There is no explicit schedule. Python only queues kernels, each device works through its own queue,
and autograd runs the backward pass with one thread per device. The fraction of the time in which p
equal stages are idle with m micro-batches (the "bubble") is (p - 1) / (m + p - 1) (Huang et al.
2018, GPipe, arXiv:1811.06965). CPUs have no queues: nothing overlaps there. BatchNorm normalises
each micro-batch separately: use num_microbatches=1 if its statistics must be those of the local
batch.
"""

from collections import OrderedDict
from copy import deepcopy
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call

from ddp_lab.config.errors import count
from ddp_lab.config.types import Count, DeviceName
from ddp_lab.data.trees import Tree, chunk, to
from ddp_lab.models.buffers import copy_buffers
from ddp_lab.models.chain import Chain, tie, tied_parameters, untie
from ddp_lab.models.partition import Partition
from ddp_lab.strategies.base import Strategy
from ddp_lab.tasks.base import Task
from ddp_lab.world.device import find_device
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:
    from ddp_lab.models.cut_points import CutPoints
    from ddp_lab.strategies.traced_split import TracedSplit


class Split(Strategy):
    """A pipeline over the devices of one process.

    Args:
        devices: device of each stage, repetitions allowed; null uses all GPUs that `device` allows,
            or [cpu, cpu] without a GPU.
        num_microbatches: number of micro-batches that a batch is divided into.

    Raises:
        NodeError: this machine does not have one of the devices.
        ConfigError: there are more devices than blocks (in `partition`).
    """

    one_process = True
    cuts_model = True
    compiled_by_block = True
    supported_options = frozenset({"compile", "channels_last", "fused"})

    def __init__(self, runtime: Runtime, devices: list[DeviceName] | None, num_microbatches: Count):
        super().__init__(runtime)
        self.unsupported["cuda_graph"] = (
            "the memory of a CUDA graph belongs to one device, and strategy=split has several in "
            "one process; strategy=pipeline has a process for each device"
        )
        self.devices_are_given = devices is not None
        if devices:
            self.devices = [find_device(name, "strategy.devices") for name in devices]
        else:
            self.devices = runtime.devices * (2 if runtime.device.type == "cpu" else 1)
        self.device = self.devices[0]
        self.num_devices = len(set(self.devices))
        self.num_microbatches = num_microbatches
        self.traced: TracedSplit | None = None  # of a model that is no Chain

    def use_device(self, device: torch.device) -> None:
        super().use_device(device)
        self.devices = [device] * len(self.devices)

    def partition(self, model: nn.Module, samples: int) -> None:
        self.calls_blocks = isinstance(model, Chain)
        # What a forward pass writes to a parameter is no part of a trace.
        self.copies_weights = not self.calls_blocks
        super().partition(model, samples)
        if isinstance(model, Chain):
            self._cut(model)
        else:
            from ddp_lab.strategies.traced import OF_TRACES
            from ddp_lab.strategies.traced_split import TracedSplit

            self.unsupported["compile"] = OF_TRACES
            self.traced = TracedSplit(self, model, self.devices, samples)
            self.parts = self.traced.parts

    def _cut(self, model: Chain) -> None:
        """Cut a model that is a Chain."""
        if not self.devices_are_given:
            self.devices = self.devices[: len(model)]
            self.num_devices = len(set(self.devices))
        self.parts: Partition | CutPoints = Partition(model, len(self.devices))
        self.ties = tied_parameters(model)

    def setup(self, model: nn.Module) -> None:
        self.module = model
        # in training the outputs are on the last device, in an evaluation on the first one
        self._task_on_last = self.task
        if self.device_of_loss != self.device:
            self._task_on_last = deepcopy(self.task).to(self.device_of_loss)
        if self.traced is not None:
            if self.initial_weights is not None:
                self.to_device(model, torch.device("cpu"))
            self.module = self.traced.place(model)
            self.stages: list[nn.Module] = [self.module]
            return
        # A parameter of several stages stays on the device of the first one that has it.
        untie(model, self.ties)
        blocks = list(model.named_children())
        self.stages = [
            self.to_device(nn.Sequential(OrderedDict(blocks[i] for i in indices)), device)
            for indices, device in zip(self.parts.parts, self.devices, strict=True)
        ]
        tie(model, self.ties)
        self.elsewhere = [
            {
                name: parameter
                for name, parameter in stage.named_parameters(remove_duplicate=False)
                if parameter.device != device
            }
            for stage, device in zip(self.stages, self.devices, strict=True)
        ]

    @property
    def task_of_steps(self) -> Task:
        return self._task_on_last

    @property
    def device_of_loss(self) -> torch.device:
        return self.devices[-1]

    def train(self, mode: bool = True) -> None:
        super().train(mode)
        if self._task_on_last is self.task:
            return
        self._task_on_last.train(mode)
        if not mode:
            copy_buffers(self._task_on_last, self.task, self.device)

    @property
    def modules_by_device(self) -> list[nn.Module]:
        return self.stages

    def describe(self) -> str:
        micro_batches = count(self.num_microbatches, "micro-batch")
        return f"split: {self.parts.describe(self.devices)}; {micro_batches}"

    @torch.no_grad()
    def predict(self, inputs: Tree) -> Any:
        self.require_inputs(inputs)
        if self.traced is not None:
            return self.traced.predict(inputs)
        assert isinstance(inputs, torch.Tensor)
        return self._through_stages(inputs).to(self.device)

    def require_called_hooks(self, model: nn.Module) -> None:
        if self.traced is not None:
            self.traced.require_no_hooks(model)
        super().require_called_hooks(model)

    def _through_stages(self, activation: torch.Tensor) -> torch.Tensor:
        """Return the logits of one micro-batch, on the last device."""
        with self.autocast():
            for stage, device, elsewhere in zip(
                self.stages, self.devices, self.elsewhere, strict=True
            ):
                activation = activation.to(device, non_blocking=True)
                if elsewhere:
                    # autograd adds the gradients of the copies
                    copies = {
                        name: parameter.to(device, non_blocking=True)
                        for name, parameter in elsewhere.items()
                    }
                    activation = functional_call(stage, copies, activation)
                else:
                    activation = stage(activation)
        return activation

    def add_gradient(
        self, inputs: Tree, targets: Tree, num_valid: int, divisor: float | torch.Tensor
    ) -> torch.Tensor:
        self.require_inputs(inputs)
        if self.traced is not None:
            measure = partial(self.measure, self._task_on_last)
            sums = self.traced.add_gradient(inputs, targets, num_valid, divisor, measure)
            return sums.to(self.device, non_blocking=True)
        losses: list[torch.Tensor] = []
        results: list[torch.Tensor] = []
        batch: list[tuple[Any, Tree]] = chunk(
            (inputs, to(targets, self.devices[-1])), self.num_microbatches
        )
        for micro_batch, expected in batch:
            num_samples = min(num_valid, len(micro_batch))
            num_valid -= num_samples
            loss, sums = self.measure(
                self._task_on_last,
                self._through_stages(micro_batch),
                expected,
                num_samples,
                divisor,
            )
            losses.append(loss)
            results.append(sums)
        reduce(torch.add, losses).backward()
        return reduce(torch.add, results).to(self.device, non_blocking=True)
