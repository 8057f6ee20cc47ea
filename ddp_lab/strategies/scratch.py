"""Data parallelism by hand, with nothing but `torch.distributed`: a broadcast, and an all-reduce that can be chosen.

Every rank holds a whole copy of the model. One step:

    rank 0:  its part of the batch -> forward -> backward -> gradients --+
    rank 1:  its part of the batch -> forward -> backward -> gradients --+-- all_reduce: every rank gets the sum
    ...                                                                  |
    rank k:  its part of the batch -> forward -> backward -> gradients --+

and then every rank takes the same optimizer step from the same weights with the same gradients, so the copies stay equal
without ever being sent again. How the sum is made is in all_reduce.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist

from ddp_lab.config.types import Positive
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.all_reduce import ALGORITHMS, Buckets, MiB, gradients_of, set_gradients
from ddp_lab.strategies.base import ALL_PERFORMANCE_OPTIONS, Strategy
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm
from ddp_lab.world.runtime import Runtime

LAST = MiB  # bytes: the most that `bucketed` leaves for its last bucket, of a model that has more


class Scratch(Strategy):
    """Data parallelism by hand.

    Args:
        algorithm: how the gradients are summed over the ranks; bucketed sums while backward still computes.
        bucket_mb: MiB of gradients that fill a bucket of algorithm=bucketed. A bucket is complete blocks, from the last to the
            first. The first blocks, up to 1 MiB, have their own, because no backward is left to hide its communication.
        batch_norm: ranks over which BatchNorm computes its statistics in training: each rank by itself (local) or all ranks
            of the data parallelism together (sync).
    """

    performance_options = ALL_PERFORMANCE_OPTIONS

    def __init__(
        self,
        runtime: Runtime,
        algorithm: Literal["star", "per_tensor", "flat", "bucketed", "ring"],
        bucket_mb: Positive,
        batch_norm: BatchNorm,
    ):
        super().__init__(runtime)
        self.algorithm, self.batch_norm = algorithm, batch_norm
        self.sizes = (bucket_mb * MiB, LAST)
        self.buckets: Buckets | None = None

    def setup(self, model: Chain) -> None:
        self.module = self.forward = set_batch_norm(model.to(self.device), self.batch_norm)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor, src=0)  # whatever a rank started with, all start as rank 0
        if self.algorithm == "bucketed":
            self.buckets = Buckets(list(piece.parameters()) for piece in self.module.pieces(*self.sizes))

    def compile(self, fuse: Callable) -> None:
        super().compile(fuse) if self.buckets is None else self.compile_pieces(fuse, *self.sizes)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if self.buckets is not None:
            self.buckets.active = False
        yield
        if self.buckets is not None:
            self.buckets.active = True

    def reduce_gradients(self) -> None:
        # Each loss was divided by the GLOBAL count, so the gradient of the global mean is the plain sum over the ranks.
        if self.buckets is not None:
            self.buckets.finish()
        else:
            set_gradients(self.parameters(), ALGORITHMS[self.algorithm](gradients_of(self.parameters())))
