"""Strategies of a user with an error each, which a proof must find and name."""

import math
from typing import Any

import torch
import torch.distributed as dist
from own_strategies import Mine
from torch import nn

from ddp_lab.strategies.base import gradients_of


class SumForMean(Mine):
    """Takes the loss for a mean over the local batch, whose sum it divides by its own samples."""

    def add_gradient(
        self, inputs: Any, targets: Any, num_valid: int, divisor: float
    ) -> torch.Tensor:
        return super().add_gradient(inputs, targets, num_valid, divisor / self.dp_size)


class MeanTwice(Mine):
    """Divides by the number of ranks what is divided by the GLOBAL batch already."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        self.scale_gradients(torch.tensor(1 / self.dp_size))


class ForgetsSum(Mine):
    """Leaves each rank its own gradients."""

    def reduce_gradients(self) -> None:
        pass


class ForgetsOne(Mine):
    """Sums all gradients but that of the last parameter."""

    def reduce_gradients(self) -> None:
        for gradient in gradients_of(self.module.parameters())[:-1]:
            dist.all_reduce(gradient)


class ClipsByLocalNorm(Mine):
    """Clips by the norm of a quarter of the gradient's squares, as a rank of four shards has."""

    def gradient_norm(self) -> torch.Tensor:
        return super().gradient_norm() / math.sqrt(4)


class DividesByFullBatch(Mine):
    """Divides the sum of the losses by the size of a full batch, also in a partial one."""

    full = 0

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        self.full = max(self.full, self.global_size)
        self.scale_gradients(torch.tensor(self.global_size / self.full, dtype=torch.float64))


class MeanOfMeans(Mine):
    """Averages the means of the ranks, whose local batches are unequal in a partial batch."""

    def add_gradient(
        self, inputs: Any, targets: Any, num_valid: int, divisor: float
    ) -> torch.Tensor:
        valid = max(1, self.valid_samples(self.global_size))
        return super().add_gradient(inputs, targets, num_valid, float(valid * self.dp_size))


class ForgetsFirstMicroBatch(Mine):
    """Clears the gradients before the last micro-batch of gradient accumulation."""

    def _add_gradient(
        self, inputs: Any, targets: Any, num_valid: int, divisor: float
    ) -> torch.Tensor:
        self.module.zero_grad()
        return super()._add_gradient(inputs, targets, num_valid, divisor)


class OtherStart(Mine):
    """Begins with weights of its own on rank 0."""

    def setup(self, model: nn.Module) -> None:
        super().setup(model)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.add_(1 - self.dp_rank)


class Drifts(Mine):
    """Lets the gradients of the last rank be those of no other, by half."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        if self.dp_rank == self.dp_size - 1:
            self.scale_gradients(torch.tensor(0.5))


class Dies(Mine):
    """Ends the process of a rank in the first step."""

    def reduce_gradients(self) -> None:
        if self.dp_rank == 1:
            raise SystemExit(3)
        super().reduce_gradients()
