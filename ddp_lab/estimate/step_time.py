"""The time of a training step, from the operations of its blocks and what the ranks send.

Every kernel takes the longer of its computation and its memory traffic (the roofline model, Williams et al. 2009), at the
fractions of the card's peaks that `constants` holds. In eager mode a step cannot be faster than Python launches its kernels.
The ranks of a pipeline are idle for (p-1)/v of their stages (docs/strategies.md). Communication counts as far as no
computation hides it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ddp_lab.estimate.cards import Card
from ddp_lab.estimate.constants import Constants
from ddp_lab.estimate.recorder import Operation

# Kernels of an eager operation, and of the rest of a step (batch, metrics). From traces of LeNet and ResNet-18 on an H200
# with torch 2.11, 2026-11-23.
KERNELS, REST_KERNELS = 1.6, 28
FUSED = 0.55  # the shortest of the kernels that torch.compile generates, in kernels of cuDNN
# Seconds of a sum however few bytes it reads, and of a row in the gradient of a layer normalization's weight. From traces of a
# ViT-S/16 on H200s with torch 2.11, 2026-11-23: sums of 14 MB take 21 us, of 58 MB 59 us and of 115 MB 79 us.
REDUCTION, ROW = 12e-6, 4.2e-9


@dataclass(frozen=True)
class StepTime:
    """The predicted seconds of a step on the slowest rank.

    Attributes:
        compute: of the kernels on the device.
        launching: that the device waits for Python to launch kernels.
        communication: exposed communication.
        bubble: that the ranks of a pipeline wait for each other.
    """

    compute: float
    launching: float
    communication: float
    bubble: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Work:
    """Kernels of a part of a step: their seconds on the device, and what launching them takes, in launches."""

    seconds: float = 0.0
    kernels: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.seconds + other.seconds, self.kernels + other.kernels)

    def __mul__(self, times: float) -> "Work":
        return Work(self.seconds * times, self.kernels * times)


@dataclass(frozen=True)
class Device:
    """A card with its constants, and how kernels are launched on it.

    Attributes:
        graph: whether a step is captured as a CUDA graph.
        channels_last: whether images and convolutions use that memory format.
    """

    card: Card
    constants: Constants
    graph: bool = False
    channels_last: bool = False

    def work(self, operations: Iterable[Operation]) -> Work:
        """Return the work of operations."""
        total = Work()
        shortest = self.constants.replay if self.graph else 0.0
        for operation in operations:
            least = shortest * (FUSED if operation.kind == "fused" else KERNELS)
            total += Work(max(self.seconds(operation), least), operation.launches)
        return total

    def seconds(self, operation: Operation) -> float:
        """Return the seconds of a kernel."""
        computing = operation.flops / self.speed(operation)
        if operation.kind == "convolution":
            computing += operation.passes * self.constants.start
        moving = operation.nbytes / (self.card.bandwidth * self.achieved(operation))
        if operation.kind == "reduction":
            moving += REDUCTION
        return max(computing, moving) + operation.rows * ROW

    def achieved(self, operation: Operation) -> float:
        """Return the fraction of the memory bandwidth that a kernel achieves."""
        name = operation.kind if operation.kind in ("strided", "reduction", "pooling", "fused") else "bandwidth"
        if operation.kind == "batch_norm":
            mixed = operation.dtype == torch.bfloat16
            name = "batch_norm" + "_bf16" * mixed + "_last" * self.channels_last
        return getattr(self.constants, name)

    def speed(self, operation: Operation) -> float:
        """Return the FLOP/s that a kernel achieves where memory does not limit it."""
        card, constants = self.card, self.constants
        mixed = operation.dtype == torch.bfloat16
        if operation.kind == "convolution":  # torch lets cuDNN, but not cuBLAS, use TF32
            first, last = (
                (constants.convolution, constants.convolution_last) if mixed else (constants.tf32, constants.tf32_last)
            )
            return (card.bf16 if mixed else card.tf32) * (last if self.channels_last else first)
        if not mixed:
            return card.float32 * constants.float32
        return card.bf16 * (constants.attention if operation.kind == "attention" else constants.bf16)

    def traffic(self, nbytes: float) -> float:
        """Return the seconds in which elementwise operations read and write so many bytes."""
        return nbytes / (self.card.bandwidth * self.constants.bandwidth)

    def launching(self, work: Work) -> float:
        """Return by how much launching the kernels exceeds their execution."""
        if self.graph:
            return REST_KERNELS * self.constants.replay
        return max(0.0, work.kernels * self.constants.launch + self.constants.step - work.seconds)


@dataclass(frozen=True)
class Links:
    """The connections between GPUs.

    Attributes:
        inside, between: bytes per second that a GPU sends within its machine, and to other machines.
        per_node: number of GPUs of a machine.
        latency: seconds of a small collective.
    """

    inside: float
    between: float
    per_node: int
    latency: float

    def speed(self, ranks: int, neighbours: int = 1) -> float:
        """Return the bytes per second of the slowest link of a group.

        Args:
            ranks: number of its ranks.
            neighbours: distance of consecutive ranks of the group.
        """
        return self.inside if ranks * neighbours <= self.per_node else self.between

    def gather(self, nbytes: float, ranks: int, neighbours: int = 1, calls: float = 1) -> float:
        """Return the seconds of all_gathers or reduce_scatters of so many bytes in all, of which a rank sends (W-1)/W."""
        if ranks == 1:
            return 0.0
        return nbytes * (ranks - 1) / ranks / self.speed(ranks, neighbours) + calls * self.latency

    def all_reduce(self, nbytes: float, ranks: int, neighbours: int = 1, calls: float = 1) -> float:
        """Return the seconds of all-reduces of so many bytes in all; a rank sends 2 (W-1)/W times as many."""
        return self.gather(2 * nbytes, ranks, neighbours, calls)

    def send(self, nbytes: float, far: bool = False) -> float:
        """Return the seconds in which a rank sends so many bytes to another one.

        Args:
            far: whether the other one is on another machine.
        """
        return nbytes / (self.between if far else self.inside) + self.latency / 2
