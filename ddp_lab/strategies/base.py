"""The base class of all strategies: methods for one device, some of which each strategy overrides."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.models.initial_weights import InitialWeights
from ddp_lab.strategies.all_reduce import gradients_of, trainable
from ddp_lab.strategies.batch_norm import BatchNorm
from ddp_lab.strategies.compilation import Fuse, compile_blocks, count, repeats
from ddp_lab.strategies.fill import fill
from ddp_lab.strategies.loss import CrossEntropy, Loss
from ddp_lab.strategies.saved_state import SavedState
from ddp_lab.strategies.share import Share
from ddp_lab.strategies.sums import add_up, measure
from ddp_lab.world.runtime import Runtime

MicroBatch = tuple[torch.Tensor, torch.Tensor]  # inputs [b, channels, height, width] and targets [b]
Module = TypeVar("Module", bound=nn.Module)

ALL_PERFORMANCE_OPTIONS = frozenset({"cuda_graph", "compile", "channels_last", "fused"})


class Strategy(SavedState, ABC):
    """One way of distributing a training step over devices.

    The methods are called in this order:

        strategy = SomeStrategy(runtime, ...)   decides which local batch this rank reads, so it comes before the data
        strategy.partition(model, samples)      decides which rank holds what
        (the process group opens, unless the strategy runs in one process)
        strategy.setup(model)                   moves, wraps or cuts the model
        optimizer = SGD(strategy.param_groups())
        strategy.forward_backward(...)          in every training step; then the optimizer's step
        strategy.predict(...)                   on every test batch

    Attributes:
        module: this rank's part of the model, unwrapped, so that its parameters keep their plain names.
        forward: computes the logits: `module` or a wrapper around it. Used by the default methods of this class.
        axes: size of each axis of the device mesh by name; the last one varies fastest with the rank.
        dp_rank, dp_size: a global batch consists of `dp_size` local batches, of which this rank reads number `dp_rank`.
        dp_group: ranks that hold the same part of the model and read different local batches; None: all ranks.
        batch_norm: whether BatchNorm normalises by the local batch ("local") or the global batch ("sync").
        one_process: whether one process drives all devices, without a process group.
        needs_chain: whether the model must be a Chain, because the strategy cuts it into blocks.
        sharded: whether the ranks of dp_group hold shards of the model instead of replicas.
        supports_mps: whether the strategy can train on a Mac's GPU.
        performance_options: the supported ones of cuda_graph, compile, channels_last, and fused: optimizers' fused kernels.
        collective_passes: whether forward and backward contain collectives other than those of gradients, so that no rank can
            run them alone.
        reports: whether this rank's sums count; True on one rank of each replica.
        device: device that this rank's batches must be on.
        replicas: number of copies of the model that share a global batch.
        num_devices: number of devices in use, over all ranks.
        loss: the training loss, on `device`. Set before `setup`.
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
    performance_options: ClassVar[frozenset[str]] = frozenset()
    collective_passes: ClassVar[bool] = False

    forward: nn.Module
    input_shape: tuple[int, ...]

    def __init__(self, runtime: Runtime):
        if self.one_process and runtime.world_size > 1:
            raise ConfigError(
                f"strategy={self.name}: runs in one process, but {runtime.world_size} ranks were started. Start "
                f"`python -m ddp_lab strategy={self.name}`, or use a strategy for several processes, for example ddp"
            )
        if runtime.device.type == "mps" and not self.supports_mps:
            raise ConfigError(
                f"device=mps: is not supported by strategy={self.name}: a Mac has one such device, and gloo and NCCL do not "
                "take its tensors. Use strategy=single, or device=cpu"
            )
        self.runtime = runtime
        self.device = runtime.device
        self.num_devices = runtime.world_size
        self.reports = True
        self.batch_norm: BatchNorm = "local"
        self.dp_group: dist.ProcessGroup | None = None
        self.loss: Loss = CrossEntropy()
        self.initial_weights: InitialWeights | None = None
        self.times_file: Path | None = None
        self.measure: Callable[[Loss, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]] = measure
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
        for axis, size in inner.items():
            if ranks % size:
                fitting = " or ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
                raise ConfigError(
                    f"strategy.{axis}={size}: cannot lay {ranks} rank{'s' * (ranks > 1)} on a mesh of dp x {axis}, because "
                    f"{ranks} is not divisible by {size}; use {fitting}, or start a multiple of {size} ranks"
                )
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

    def share(self, model: nn.Module, rank: int) -> Share:
        """Return what a rank will hold of the complete model. Called between `partition` and `setup`; allocates nothing.

        Args:
            rank: number of the rank; under split, of the device.
        """
        return Share()

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

    def why_not_compile(self, model: nn.Module) -> str | None:
        """Return why `compile` does not support the model, or None if it does."""
        return None

    def why_not_capture(self) -> str | None:
        """Return why a step with these options cannot be captured as a CUDA graph, or None if it can."""
        return None

    def compile(self, fuse: Fuse) -> str:
        """Compile forward, loss and backward. Called after `setup`, if "compile" is one of the `performance_options`.

        Returns:
            What of the model was compiled, for the log.
        """
        self.measure = fuse(measure)
        return compile_blocks(self.module.children(), fuse) if repeats(self.module) else self.compile_model(fuse)

    def compile_model(self, fuse: Fuse) -> str:
        """Compile a model whose blocks are not equal; part of `compile`."""
        self.forward = fuse(self.module)
        return "the complete model"

    def compile_pieces(self, fuse: Fuse, *sizes: float) -> str:
        """Compile the model in several pieces, so that the gradients of a piece are complete when its own backward pass ends.

        A bucket can then be sent while the next piece computes. Kernels are not fused across a cut, which costs some time
        (docs/benchmarks-log.md).

        Args:
            fuse: torch.compile with its options.
            sizes: the arguments of `Chain.pieces`, in bytes.
        """
        assert isinstance(self.module, Chain)
        pieces = self.module.pieces(*sizes)
        self.module.execute_in(map(fuse, pieces))
        return f"the model in {count(len(pieces), 'piece')}"

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

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of the forward pass: autocast, unless the strategy has its own mixed precision."""
        return self.runtime.autocast()

    def divisor(self, count: int) -> float:
        """Return the number that a summed loss is divided by before backward.

        After backward and `reduce_gradients`, `.grad` must be the gradient of the mean over the GLOBAL batch. The divisor is
        therefore `count` if gradients are summed over the replicas, and `count / dp_size` if a wrapper such as DDP averages
        them.

        Args:
            count: number of samples in the GLOBAL batch, without padding.
        """
        return count

    def no_sync(self) -> AbstractContextManager[object]:
        """Return the context of all gradient-accumulation steps but the last: gradients accumulate and are not communicated."""
        return nullcontext()

    def reduce_gradients(self) -> None:
        """Communicate the gradients that the last backward pass of the step has not communicated."""

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor, count: int, accumulate: int = 1) -> torch.Tensor:
        """Compute `.grad` of the mean loss over the GLOBAL batch, the same on every replica. Collective.

        Args:
            inputs: local batch, [b, channels, height, width].
            targets: [b], IGNORE for padding; or mixed ones, [b, classes] (data/mix.py).
            count: number of samples in the GLOBAL batch, without padding.
            accumulate: number of gradient-accumulation steps. Only one micro-batch's activations are in memory at a time.

        Returns:
            [loss_sum, correct, count] of the local batch.
        """
        micro_batches = list(zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True))
        if self.batch_norm == "sync":
            micro_batches = self._without_padding(micro_batches, count)
        *early, last = micro_batches
        with self.no_sync():
            results = [self.add_gradient(*micro_batch, count) for micro_batch in early]
        results.append(self.add_gradient(*last, count))
        self.reduce_gradients()
        return add_up(results)

    def _without_padding(self, micro_batches: list[MicroBatch], count: int) -> list[MicroBatch]:
        """Remove the padding of a partial last batch: it does not count in the loss, but would in BatchNorm's statistics.

        Micro-batches may be empty afterwards. They are kept, because their number must be the same on every rank.
        """
        left = len(range(self.dp_rank, count, self.dp_size))  # this rank reads every dp_size-th sample of the global batch
        kept: list[MicroBatch] = []
        for inputs, targets in micro_batches:
            kept.append((inputs[:left], targets[:left]))
            left = max(0, left - len(targets))
        return kept

    def add_gradient(self, inputs: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
        """Add the gradient of one micro-batch to `.grad` and return the micro-batch's [loss_sum, correct, count].

        Args:
            inputs: [b, channels, height, width].
            targets: [b], IGNORE for padding.
            count: number of samples in the GLOBAL batch, without padding.
        """
        with self.autocast():
            logits = self.forward(inputs)
        loss, results = self.measure(self.loss, logits, targets, self.divisor(count))
        loss.backward()
        return results

    def gradient_norm(self) -> torch.Tensor:
        """Return the L2 norm of the complete model's gradient, [], the same on every rank.

        Collective. Called after `forward_backward`.
        """
        return get_total_norm(gradients_of(self.parameters())).to(self.device)  # on the CPU if all parameters here are frozen

    @torch.no_grad()
    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits, [b, classes], of a local batch, [b, channels, height, width], without a gradient."""
        with self.autocast():
            return self.forward(inputs)

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

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that this rank holds and trains, without the frozen ones. Called after `setup`."""
        return trainable(self.module.parameters())

    def param_groups(self, decay_norms_and_biases: bool = True) -> list[dict[str, Any]]:
        """Return `parameters` in the form that optimizers accept. Called after `setup`.

        Args:
            decay_norms_and_biases: whether weight decay applies to all parameters. Otherwise those with fewer than two
                dimensions, which are biases and the weights of normalization layers, form a second group, as in timm. Every
                rank has both groups, which may be empty.
        """
        if decay_norms_and_biases:
            return [{"params": list(self.parameters())}]
        decayed = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.parameters() if parameter.dim() <= 1]
        return [{"params": decayed}, {"params": others, "weight_decay": 0.0}]

    def forget_gathered(self) -> None:
        """Discard the strategy's own copies of parameters, because other code than the optimizer is about to change them."""
