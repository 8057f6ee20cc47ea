"""Data parallelism by hand, with nothing but `torch.distributed`: one broadcast, and an all-reduce in every step.

Every rank holds a complete copy of the model. One step:

    rank 0:  local batch -> forward -> backward -> gradients --+
    rank 1:  local batch -> forward -> backward -> gradients --+-- all_reduce: every rank gets the sum
    ...                                                        |
    rank k:  local batch -> forward -> backward -> gradients --+

Every rank then takes the same optimizer step, from the same weights with the same gradients. The copies therefore stay equal,
and the weights are sent only once, at the beginning. The algorithms that compute the sum are in all_reduce.py and
buckets.py.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated

import torch
import torch.distributed as dist
from annotated_types import Predicate
from torch import nn

from ddp_lab.config.errors import TrainingError
from ddp_lab.config.types import Allowed, Positive
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.all_reduce import ALGORITHMS, require_ranks, sum_gradients, trainable
from ddp_lab.strategies.base import ALL_PERFORMANCE_OPTIONS, Strategy
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm
from ddp_lab.strategies.buckets import Buckets, MiB, fill_buckets
from ddp_lab.strategies.sharding import to_device
from ddp_lab.world.runtime import Runtime

NAMES = (*ALGORITHMS, "bucketed")
Algorithm = Annotated[str, Predicate(lambda name: name in NAMES), Allowed(" or ".join(NAMES))]
LAST_BUCKET = MiB  # maximum bytes of the bucket that `bucketed` sends last, if the model is larger


class Scratch(Strategy):
    """Data parallelism by hand: gradients are summed over the ranks, with a choice of algorithms.

    Args:
        algorithm: how the gradients are summed over the ranks; bucketed does it during the backward pass.
        bucket_mb: MiB of gradients that fill a bucket of algorithm=bucketed. A bucket consists of complete blocks, from the
            last to the first. The first blocks, up to 1 MiB, have a bucket of their own, because no backward pass is left that
            could hide its communication.
    """

    performance_options = ALL_PERFORMANCE_OPTIONS

    def __init__(
        self,
        runtime: Runtime,
        algorithm: Algorithm,
        bucket_mb: Positive,
        batch_norm: BatchNorm,
    ):
        super().__init__(runtime, batch_norm=batch_norm)
        require_ranks(algorithm, runtime.world_size)
        self.algorithm = algorithm
        self.bucket_sizes = (bucket_mb * MiB, LAST_BUCKET) if algorithm == "bucketed" else ()
        self.buckets: Buckets | None = None

    def setup(self, model: nn.Module) -> None:
        model = set_batch_norm(to_device(model, self.device, self.initial_weights), self.batch_norm)
        self.module = self.forward = model
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor, src=0)  # all ranks start with the weights of rank 0
        if self.bucket_sizes:
            if isinstance(model, Chain):
                self.buckets = Buckets(list(piece.parameters()) for piece in model.pieces(*self.bucket_sizes))
            else:
                self.buckets = Buckets(fill_buckets(list(trainable(model.parameters())), self.bucket_sizes[0]))

    @contextmanager
    def no_sync(self) -> Generator[None]:
        if self.buckets is not None:
            self.buckets.active = False
        try:
            yield
        finally:
            if self.buckets is not None:
                self.buckets.active = True

    def reduce_gradients(self) -> None:
        self.require_gradients()
        # Each rank's loss was divided by the size of the GLOBAL batch, so the sum over the ranks is the gradient of the mean.
        if self.buckets is not None:
            self.buckets.finish()
        else:
            sum_gradients(self.module.parameters(), ALGORITHMS[self.algorithm])

    def require_gradients(self) -> None:
        """Check that the step has used all parameters: the sums are over the same gradients on every rank.

        Raises:
            TrainingError: a parameter got no gradient.
        """
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                rank = self.runtime.rank
                raise TrainingError(
                    f"strategy=scratch: the parameter {name} got no gradient in a step on rank {rank}. If only some steps use "
                    "a parameter, use strategy=fsdp or strategy=single, which support it",
                    rank=rank,
                )
