"""The base class of all strategies: methods for one device, some of which each strategy overrides.

What a strategy computes in a step is in forward_backward.py, what of it is compiled in compilation.py, and what of it is saved
in saved_state.py.
"""

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.initial_weights import InitialWeights
from ddp_lab.strategies.fill import ShapesOnly, fill
from ddp_lab.strategies.forward_backward import ForwardBackward
from ddp_lab.strategies.mesh_layout import require_division
from ddp_lab.strategies.saved_state import SavedState
from ddp_lab.world.runtime import Runtime

Module = TypeVar("Module", bound=nn.Module)
ALL_PERFORMANCE_OPTIONS = frozenset({"cuda_graph", "compile", "channels_last", "fused"})


class Strategy(ForwardBackward, SavedState, ABC):
    """One way of distributing a training step over devices.

    The methods are called in this order:

        strategy = SomeStrategy(runtime, ...)   decides which local batch this rank reads, so it comes before the data
        strategy.partition(model, samples)      decides which rank holds what
        (the process group opens, unless the strategy runs in one process)
        strategy.setup(model)                   moves, wraps or cuts the model
        optimizer = SGD(strategy.param_groups())
        strategy.forward_backward(...)          in every training step; then the optimizer's step
        strategy.predict(...)                   on every test batch

    Attributes, besides those of `ForwardBackward`:
        axes: size of each axis of the device mesh by name; the last one varies fastest with the rank.
        dp_group: ranks that hold the same part of the model and read different local batches; None: all ranks.
        one_process: whether one process drives all devices, without a process group.
        needs_chain: whether the model must be a Chain, because the strategy cuts it into blocks.
        sharded: whether the ranks of dp_group hold shards of the model instead of replicas.
        has_dtensors: whether parameters become DTensors; known after `partition`.
        supports_mps: whether the strategy can train on a Mac's GPU.
        reports: whether this rank's sums count; True on one rank of each replica.
        replicas: number of copies of the model that share a global batch.
        num_devices: number of devices in use, over all ranks.
        initial_weights: of a model that is on the meta device; None if the model has its weights. Set before `setup`.
        times_file: where `strategy.balance=time` keeps the times of the blocks; None: nowhere. Set before `setup`.
        input_shape: a sample's (channels, height, width), for models that are not Chains. Set before `partition`.

    Raises:
        ConfigError: a one-process strategy was started with several ranks, or the device is not supported by the strategy.
    """

    one_process: ClassVar[bool] = False
    needs_chain: ClassVar[bool] = False
    supports_mps: ClassVar[bool] = False
    sharded: bool = False
    has_dtensors: bool = False

    input_shape: tuple[int, ...]

    def __init__(self, runtime: Runtime):
        if self.one_process and runtime.world_size > 1:
            raise ConfigError(
                f"strategy={self.name}: runs in one process, but {runtime.world_size} ranks were started. Start "
                f"`ddp-lab train strategy={self.name}`, or use a strategy for several processes, for example ddp"
            )
        if runtime.device.type == "mps" and not self.supports_mps:
            raise ConfigError(
                f"device=mps: is not supported by strategy={self.name}: a Mac has one such device, and gloo and NCCL do not "
                "take its tensors. Use strategy=single, or device=cpu"
            )
        super().__init__(runtime)
        self.num_devices = runtime.world_size
        self.reports = True
        self.dp_group: dist.ProcessGroup | None = None
        self.initial_weights: InitialWeights | ShapesOnly | None = None
        self.times_file: Path | None = None
        self.lay_out()

    @property
    def name(self) -> str:
        """The value of `strategy=` that selects it, which is the name of its file."""
        return type(self).__module__.rpartition(".")[2]

    def lay_out(self, **inner: int) -> None:
        """Arrange the ranks in a mesh with the axis dp and the inner axes, and set `axes`, `dp_rank`, `dp_size` and `replicas`.

        Consecutive ranks share a replica, because they are the closest: with tp=2, ranks 0 and 1 are replica 0.

        Args:
            inner: sizes of the axes within a replica, by name. The size of dp is the number of ranks divided by their product.

        Raises:
            ConfigError: the number of ranks is not divisible by an inner axis.
        """
        ranks = self.runtime.world_size
        require_division(ranks, inner)
        ranks_per_replica = math.prod(inner.values())
        self.dp_rank = self.runtime.rank // ranks_per_replica
        self.dp_size = self.replicas = ranks // ranks_per_replica
        self.axes = {"dp": self.dp_size, **inner}

    def partition(self, model: nn.Module, samples: int) -> None:
        """Decide which rank holds which part of the model. Called before the process group opens.

        Args:
            model: the complete model, on the CPU.
            samples: size of a full local batch or, with gradient accumulation, of one of its micro-batches.

        Raises:
            ConfigError: the model or the batch cannot be divided as the strategy's options require.
        """

    @abstractmethod
    def setup(self, model: nn.Module) -> None:
        """Move `model` to the devices, and wrap or cut it. Collective; sets `module` and `forward`.

        Args:
            model: the complete model, the same on every rank: on the CPU, or with `initial_weights` on the meta device.
        """

    def to_device(self, blocks: Module, device: torch.device | None = None) -> Module:
        """Move blocks of the model to a device, or allocate them there with their initial weights, and return them.

        Args:
            blocks: its children are blocks of the model under their names.
            device: None: `self.device`.
        """
        device = device or self.device
        if self.initial_weights is None:
            return blocks.to(device)
        fill(blocks, self.initial_weights, device)
        return blocks

    def modules_by_device(self) -> list[nn.Module]:
        """Return the part of the model on each device that this process drives. Called after `setup`."""
        return [self.module]

    def describe(self) -> str:
        """Return a line for the log: which part of the model is on which device. Called after `setup`."""
        return f"{self.name} on {self.where}"

    @property
    def where(self) -> str:
        """Number and kind of the devices, for the log, for example "2 x cpu"."""
        kind = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return f"{self.num_devices} x {kind}"

    def bubble(self) -> float | None:
        """Return the fraction of a step in which the ranks of a balanced pipeline are idle; None if it is not a pipeline.

        Called after `partition`.
        """
        return None

    def time_slots(self) -> dict[int, list[tuple[int, int, str, int]]]:
        """Return when each rank of a pipeline computes what, as in schedules.py; {} without one. Called after a step."""
        return {}

    def total(self, *sums: torch.Tensor) -> torch.Tensor:
        """Return the sums over all ranks, on the host. Collective; waits for the device, so call it once per epoch.

        Args:
            sums: vectors of the same dtype. Each is added separately, because the size of a vector affects the order in which
                the ranks' values are added.

        Returns:
            The concatenated sums.
        """
        return torch.cat([self.runtime.all_reduce(own if self.reports else torch.zeros_like(own)) for own in sums]).cpu()

    def train(self, mode: bool = True) -> None:
        """Switch between training and evaluation mode. Collective.

        In training mode every replica keeps its own running statistics of BatchNorm. When training mode ends, all replicas
        receive those of replica 0, so that every replica evaluates and saves the same model.
        """
        self.module.train(mode)
        self.loss.train(mode)
        if not mode and self.dp_size > 1:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, group=self.dp_group, group_src=0)

    def forget_gathered(self) -> None:
        """Discard the strategy's own copies of parameters, because other code than the optimizer is about to change them."""
