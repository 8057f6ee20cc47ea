"""Data parallelism by hand: `torch.distributed` broadcasts once and all-reduces in every step.

Every rank holds a complete copy of the model. One step:

    rank 0:  local batch -> forward -> backward -> gradients --+
    rank 1:  local batch -> forward -> backward -> gradients --+-- all_reduce: the sum, on all ranks
    ...                                                        |
    rank k:  local batch -> forward -> backward -> gradients --+

Every rank then takes the same optimizer step, from the same weights with the same gradients. The
copies therefore stay equal, and the weights are sent only once, at the beginning. The algorithms
that compute the sum are in all_reduce.py and buckets.py.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated

import torch
from annotated_types import Predicate
from torch import nn

from ddp_lab.config.types import Allowed, Positive
from ddp_lab.data.trees import Tree, size
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.all_reduce import ALGORITHMS, find_algorithm
from ddp_lab.strategies.base import ALL_PERFORMANCE_OPTIONS, Strategy
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm
from ddp_lab.strategies.buckets import Buckets, MiB, fill_buckets
from ddp_lab.strategies.contiguous import broadcast
from ddp_lab.strategies.frozen import FrozenParameters
from ddp_lab.strategies.gradients import sum_gradients, trainable
from ddp_lab.strategies.unused import every_gradient, unsupported_with_unused
from ddp_lab.tasks.base import sum_dtype, width
from ddp_lab.world.runtime import Runtime

BUCKETED = "bucketed"
NAMES = (*ALGORITHMS, BUCKETED)
DESCRIPTION = " or ".join([*NAMES, "the name of a function of yours, such as mine.tree"])
AlgorithmName = Annotated[
    str, Predicate(lambda name: name in NAMES or "." in name), Allowed(DESCRIPTION)
]
LAST_BUCKET = MiB  # maximum bytes of the bucket that `bucketed` sends last, if the model is larger


class Scratch(Strategy):
    """Data parallelism by hand: gradients are summed over the ranks, with a choice of algorithms.

    Args:
        algorithm: how the gradients are summed over the ranks; bucketed does it during the backward
            pass. Or the name of a function of yours that returns the sums of a list of gradients,
            for example mine.tree.
        bucket_mb: MiB of gradients that fill a bucket of algorithm=bucketed. A bucket consists of
            complete blocks, from the last to the first. The first blocks, up to 1 MiB, have a
            bucket of their own, because no backward pass is left that could hide its communication.
        find_unused_parameters: whether steps may use some of the parameters only, on each rank
            others (unused.py); costs a small all-reduce in every step, and of algorithm=bucketed
            some of the overlap.
    """

    supports_own_steps = True
    computes_head_losses = True
    supported_options = ALL_PERFORMANCE_OPTIONS
    has_equal_work = True

    def __init__(
        self,
        runtime: Runtime,
        algorithm: AlgorithmName,
        bucket_mb: Positive,
        batch_norm: BatchNorm,
        find_unused_parameters: bool = False,
    ):
        super().__init__(runtime, batch_norm=batch_norm)
        self.find_unused_parameters = find_unused_parameters
        self.unsupported |= unsupported_with_unused(self)
        self.sum_over_ranks = None if algorithm == BUCKETED else find_algorithm(algorithm)
        self.bucket_sizes = (bucket_mb * MiB, LAST_BUCKET) if algorithm == BUCKETED else ()
        self.buckets: Buckets | None = None

    def setup(self, model: nn.Module) -> None:
        model = set_batch_norm(self.to_device(model), self.batch_norm)
        self.module = model
        self.forward = model
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                broadcast(tensor)  # all ranks start with the weights of rank 0
        if self.bucket_sizes:
            self.frozen = FrozenParameters(self)
            self.buckets = self._fill_buckets()

    def _fill_buckets(self) -> Buckets:
        """Return buckets of the parameters that are not frozen now."""
        model = self.module
        if isinstance(model, Chain):
            return Buckets(list(piece.parameters()) for piece in model.pieces(*self.bucket_sizes))
        return Buckets(fill_buckets(list(trainable(model.parameters())), self.bucket_sizes[0]))

    def prepare_step(self) -> None:
        if self.buckets is not None and self.frozen.changed_before_step():
            self.buckets.remove()
            self.buckets = self._fill_buckets()
        if self.timer is not None:
            self.timer.begin()

    @contextmanager
    def no_sync(self) -> Generator[None]:
        if self.buckets is not None:
            self.buckets.active = False
        try:
            yield
        finally:
            if self.buckets is not None:
                self.buckets.active = True

    def add_gradient(
        self, inputs: Tree, targets: Tree, num_valid: int, divisor: float | torch.Tensor
    ) -> torch.Tensor:
        if size(inputs) == 0 and self.batch_norm == "local":
            # A rank without a sample uses no parameter. A model whose steps differ may not support
            # empty batches.
            return torch.zeros(width(self.task), dtype=sum_dtype(self.device), device=self.device)
        return super().add_gradient(inputs, targets, num_valid, divisor)

    def reduce_gradients(self) -> None:
        if self.timer is not None:
            self.timer.end()
        # Each rank's loss was divided by the size of the GLOBAL batch, so the sum over the ranks is
        # the gradient of the mean.
        if self.buckets is not None:
            self.frozen.require_same_in_step()
        with every_gradient(self):
            if self.buckets is not None:
                self.buckets.finish()
            elif self.sum_over_ranks is not None:
                sum_gradients(self.module.parameters(), self.sum_over_ranks)
