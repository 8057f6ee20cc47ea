"""What every strategy is: a working default for one device, of which each strategy changes a few lines."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import get_total_norm

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.sharding import IGNORE
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.batch_norm import BatchNorm
from ddp_lab.world.runtime import Runtime

Piece = tuple[torch.Tensor, torch.Tensor]  # inputs and targets

ALL_PERFORMANCE_OPTIONS = frozenset({"cuda_graph", "compile", "channels_last"})

# For torch.distributed.checkpoint, which is imported where a state is saved or loaded: it brings 700 modules and takes 0.5 s.
WHOLE = {"full_state_dict": True, "cpu_offload": True}


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that sums over samples are kept in: float64, or float32 on mps, which has no float64.

    In float32 a count is exact up to 2**24 samples, and a loss sum keeps about six digits.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over the samples whose target is not IGNORE; 0 where there is none (a mean would be NaN)."""
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits  # its 8 bits would lose a sum
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sums(loss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[loss_sum, correct, count] of `sum_dtype`, on the device: sums add over steps and ranks, and divide once, on the host."""
    correct = (logits.argmax(1) == targets).sum()
    count = (targets != IGNORE).sum()
    dtype = sum_dtype(loss.device)
    return torch.stack([loss.detach().to(dtype), correct.to(dtype), count.to(dtype)])


def measure(logits: torch.Tensor, targets: torch.Tensor, divisor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss to go backward from, and the three sums."""
    loss = loss_sum(logits, targets)
    return loss / divisor, sums(loss, logits, targets)


class Strategy(ABC):
    """One way of spreading a training step over devices.

    Constructed before the data (it decides which share of a batch this rank reads), set up after the model, in an open
    process group unless `one_process`. The optimizer is made from `param_groups()` after that.

    Attributes:
        module: what this rank holds of the model, unwrapped, so that its parameters keep their plain names.
        forward: what computes the logits, `module` or a wrapper around it; for the defaults of this class.
        axes: the sizes of the named mesh axes that the ranks are laid on, "dp" first.
        dp_rank, dp_size: which share of every batch this rank reads.
        dp_group: the ranks that hold the same part of the model and other data; None: all ranks.
        batch_norm: what its BatchNorm layers take their statistics over.
        sharded: the ranks of dp_group hold parts of the model, not replicas.
        supports_mps: it can train on a Mac's GPU.
        performance_options: which of cuda_graph, compile and channels_last it can take.
        reports: whether this rank's sums count; true on one rank of each replica.
        device: where this rank's batches are wanted.
        replicas: how many copies of the model share a global batch.
        num_devices: how many devices work, over all ranks.

    Raises:
        ConfigError: a one-process strategy was started with several ranks, or the device is not supported by the strategy.
    """

    one_process: ClassVar[bool] = False
    supports_mps: ClassVar[bool] = False
    sharded: ClassVar[bool] = False
    performance_options: ClassVar[frozenset[str]] = frozenset()
    save_options: ClassVar[dict[str, bool]] = WHOLE
    load_options: ClassVar[dict[str, bool]] = WHOLE

    module: nn.Module
    forward: nn.Module

    def __init__(self, runtime: Runtime):
        if self.one_process and runtime.world_size > 1:
            raise ConfigError(
                f"strategy={self.name}: runs in one process, but {runtime.world_size} ranks were started. Start "
                f"`python train.py strategy={self.name}`, or take a strategy of several processes, ddp for example"
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
        self.measure = measure
        self.lay_out()

    @property
    def name(self) -> str:
        """The word that chooses it: its file's name."""
        return type(self).__module__.rpartition(".")[2]

    def lay_out(self, **inner: int) -> None:
        """Lays the ranks on a mesh: neighbours share a replica along the `inner` axes, data parallelism gets the rest.

        Raises:
            ConfigError: the inner axes do not divide the number of ranks.
        """
        ranks = self.runtime.world_size
        for axis, size in inner.items():
            if ranks % size:
                fitting = " or ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
                raise ConfigError(
                    f"strategy.{axis}={size}: cannot lay {ranks} rank{'s' * (ranks > 1)} on a mesh of dp x {axis}, because "
                    f"{ranks} does not divide by {size}; use {fitting}, or start a multiple of {size} ranks"
                )
        ranks_per_replica = math.prod(inner.values())
        self.dp_rank = self.runtime.rank // ranks_per_replica
        self.dp_size = self.replicas = ranks // ranks_per_replica
        self.axes = {"dp": self.dp_size, **inner}

    def partition(self, model: Chain, samples: int) -> None:  # noqa: B027, most strategies have nothing to decide
        """Decides which part of the model goes where. Before the process group opens.

        Args:
            samples: that a rank gets at once, of a whole batch: its share, or with accumulation a piece of it.

        Raises:
            ConfigError: the model or the batch cannot be spread as the options ask.
        """

    @abstractmethod
    def setup(self, model: Chain) -> None:
        """Places, wraps or cuts `model` (on the CPU, the same on every rank)."""

    def compile(self, fuse: Callable) -> None:
        """Fuses the kernels of forward, loss and backward by `fuse`, a torch.compile; for strategies that have it among their
        `performance_options`. After setup."""
        self.measure = fuse(measure)
        self.forward = fuse(self.module)

    def compile_pieces(self, fuse: Callable, *sizes: float) -> None:
        """As `compile`, but in the `Chain.pieces` of these sizes, so that a piece's gradients are there when its own backward
        ends. Every cut costs fusion (docs/benchmarks-log.md)."""
        self.measure = fuse(measure)
        self.module.execute_in(map(fuse, self.module.pieces(*sizes)))

    def describe(self) -> str:
        """One line for the log: what is where. After setup."""
        return f"{self.name} on {self.where}"

    @property
    def where(self) -> str:
        """The devices in words: how many of which kind."""
        kind = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return f"{self.num_devices} x {kind}"

    def bubble(self) -> float | None:
        """The share of a step that a pipeline's equally busy ranks are idle; None for what is no pipeline. After partition."""
        return None

    def autocast(self) -> AbstractContextManager:
        """Mixed precision for the forward pass; for strategies that do not have their own."""
        return self.runtime.autocast()

    def divisor(self, count: int) -> float:
        """What a summed loss is divided by before backward, so that after it (and `reduce_gradients`) `.grad` is the gradient
        of the GLOBAL mean: `count`, unless a wrapper takes the mean of what is to be summed over the replicas."""
        return count

    def no_sync(self) -> AbstractContextManager:
        """Forward and backward in it leave out what strategies do once a step, after the last piece of a batch."""
        return nullcontext()

    def reduce_gradients(self) -> None:  # noqa: B027, most strategies have nothing left to do
        """What is left to do for the gradient after the last backward of a step."""

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor, count: int, accumulate: int = 1) -> torch.Tensor:
        """One batch's gradient, of the mean loss over all `count` samples of the GLOBAL batch.

        Args:
            inputs, targets: this rank's share, [b, channels, height, width] and [b].
            accumulate: in how many pieces, one after the other, so that the activations of one piece alone take memory.

        Returns:
            This rank's [loss_sum, correct, count].
        """
        pieces = list(zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True))
        if self.batch_norm == "sync":
            pieces = self._without_repetitions(pieces, count)
        *early, last = pieces
        with self.no_sync():
            results = [self.add_gradient(*piece, count) for piece in early]
        results.append(self.add_gradient(*last, count))
        self.reduce_gradients()
        return sum(results[1:], results[0])

    def _without_repetitions(self, pieces: list[Piece], count: int) -> list[Piece]:
        """Less the samples that fill up a ragged batch: they have no loss, but would count in the batch's statistics."""
        left, kept = len(range(self.dp_rank, count, self.dp_size)), []
        for inputs, targets in pieces:
            kept.append((inputs[:left], targets[:left]))
            left = max(0, left - len(targets))
        return kept

    def add_gradient(self, inputs: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
        """Adds the gradient of one piece of a batch to `.grad`; returns the piece's three sums."""
        with self.autocast():
            logits = self.forward(inputs)
        loss, results = self.measure(logits, targets, self.divisor(count))
        loss.backward()
        return results

    def gradient_norm(self) -> torch.Tensor:
        """The L2 norm of the whole model's gradient, [], the same on every rank. After forward_backward; collective."""
        return get_total_norm([parameter.grad for parameter in self.parameters()])

    @torch.no_grad()
    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits [b, classes] of this rank's share, without a gradient."""
        with self.autocast():
            return self.forward(inputs)

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """This rank's [loss_sum, correct, count], without a gradient."""
        logits = self.predict(inputs)
        return sums(loss_sum(logits, targets), logits, targets)

    def total(self, sums: torch.Tensor) -> list[float]:
        """The sums over all ranks, on the host. Waits for the device: call it once an epoch."""
        return self.runtime.all_reduce(sums if self.reports else torch.zeros_like(sums)).tolist()

    def train(self, mode: bool = True) -> None:
        """Switches between training and evaluation.

        BatchNorm's running statistics are each replica's own while training; leaving it, all get replica 0's, so that
        one model is evaluated and saved.
        """
        self.module.train(mode)
        if not mode and self.dp_size > 1:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, group=self.dp_group, group_src=0)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What this rank holds of the model's. After setup."""
        return self.module.parameters()

    def param_groups(self) -> list[dict[str, Any]]:
        """`parameters` as the optimizer gets them. After setup."""
        return [{"params": list(self.parameters())}]

    def state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole model and optimizer by plain names, on the CPU. Collective; complete on rank 0, maybe empty elsewhere."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        model, optim = get_state_dict(self.module, optimizer, options=StateDictOptions(**self.save_options))
        return {"model": model, "optimizer": optim}

    def load_state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads what any strategy's `state_dict` returned; every rank has the whole of it. Collective."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_state_dict

        held, options = self.module.state_dict().keys(), StateDictOptions(**self.load_options)
        model = {name: tensor for name, tensor in state["model"].items() if name in held}
        if not state["optimizer"]["state"] or optimizer.defaults.get("momentum") == 0:
            # Without momentum SGD keeps no state, which torch's set_state_dict cannot take on either side.
            set_model_state_dict(self.module, model, options=options)
            return
        set_state_dict(
            self.module,
            optimizer,
            model_state_dict=model,
            optim_state_dict=state["optimizer"],
            options=options,
        )
