"""What a strategy computes in a training step: logits, and the gradient of the mean loss over the global batch."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from ddp_lab.strategies.all_reduce import trainable
from ddp_lab.strategies.batch_norm import BatchNorm
from ddp_lab.strategies.loss import CrossEntropy, Loss
from ddp_lab.strategies.sums import add_up, measure
from ddp_lab.world.runtime import Runtime

MicroBatch = tuple[torch.Tensor, torch.Tensor]  # inputs [b, channels, height, width] and targets [b]


class ForwardBackward:
    """The passes of a training step as one device computes them, and the parameters that get a gradient.

    A strategy overrides the methods that differ:

        forward_backward     all of a step but the optimizer's
          no_sync              context of all micro-batches but the last
            add_gradient         forward, loss and backward of one micro-batch
          reduce_gradients     communication after the last one

    Attributes:
        module: this rank's part of the model, unwrapped, so that its parameters keep their plain names.
        forward: computes the logits: `module` or a wrapper around it. Used by the methods of this class.
        batch_norm: whether BatchNorm normalises by the local batch ("local") or the global batch ("sync").
        performance_options: the supported ones of `ALL_PERFORMANCE_OPTIONS`.
        compiled_by_block: whether every block of the model is compiled alone.
        bucket_sizes: bytes that are sent during the backward pass: the arguments of `Chain.pieces`; empty: nothing is.
        refusals: why options of the strategy exclude a performance option, by its name. Known after `partition`.
        device: device that this rank's batches must be on.
        loss: the training loss, on `device`. Set before `Strategy.setup`.
        dp_rank, dp_size: a global batch consists of `dp_size` local batches, of which this rank reads number `dp_rank`.
    """

    performance_options: ClassVar[frozenset[str]] = frozenset()
    compiled_by_block: ClassVar[bool] = False
    bucket_sizes: tuple[float, ...] = ()

    module: nn.Module
    forward: nn.Module
    dp_rank: int
    dp_size: int

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.device = runtime.device
        self.batch_norm: BatchNorm = "local"
        self.loss: Loss = CrossEntropy()
        self.refusals: dict[str, str] = {}
        self.measure: Callable[[Loss, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]] = measure

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
            targets: [b], IGNORE for padding; or mixed ones, [b, classes] (data/augment.py).
            count: number of samples in the GLOBAL batch, without padding.
            accumulate: number of gradient-accumulation steps. Only one micro-batch's activations are in memory at a time.

        Returns:
            [loss_sum, correct, count] of the local batch.
        """
        micro_batches = list(zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True))
        if self.batch_norm == "sync":
            left = len(range(self.dp_rank, count, self.dp_size))  # this rank reads every dp_size-th sample of the global batch
            micro_batches = without_padding(micro_batches, left)
        *early, last = micro_batches
        with self.no_sync():
            results = [self.add_gradient(*micro_batch, count) for micro_batch in early]
        results.append(self.add_gradient(*last, count))
        self.reduce_gradients()
        return add_up(results)

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

        Collective. Called after `forward_backward`. Parameters that the step has not used do not count.
        """
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        return get_total_norm(gradients).to(self.device)  # on the CPU if all parameters here are frozen

    @torch.no_grad()
    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits, [b, classes], of a local batch, [b, channels, height, width], without a gradient."""
        with self.autocast():
            return self.forward(inputs)

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


def without_padding(micro_batches: list[MicroBatch], left: int) -> list[MicroBatch]:
    """Remove the padding of a partial last batch: it does not count in the loss, but would in BatchNorm's statistics.

    Micro-batches may be empty afterwards. They are kept, because their number must be the same on every rank.

    Args:
        left: number of samples without padding, which come first.
    """
    kept: list[MicroBatch] = []
    for inputs, targets in micro_batches:
        kept.append((inputs[:left], targets[:left]))
        left = max(0, left - len(targets))
    return kept
