"""Data and pipeline parallelism: several pipelines side by side, each computing its own local batch.

    dp 0: rank 0 -> rank 1        a (dp, pp) mesh of 2 x 2: activations and their gradients are sent along pp,
    dp 1: rank 2 -> rank 3        the parameters' gradients are summed along dp (ranks 0 and 2, ranks 1 and 3)

Every stage is wrapped in DistributedDataParallel, which sums its gradients over dp during the backward pass of the last
micro-batch.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lab.config.types import Count
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm
from ddp_lab.strategies.pipeline import Pipeline, Stage
from ddp_lab.world.runtime import Runtime

# Without interleavedzerobubble: it computes the weights' gradients separately, where DDP's hooks do not see them, so that the
# replicas silently diverge (seen in torch 2.11 and 2.15).
Schedule = Literal["gpipe", "1f1b", "interleaved1f1b", "loopedbfs"]


@dataclass
class Accumulation:
    """What a strategy shares with its stages. Not the strategy itself, which torch's schedules would keep alive.

    Attributes:
        incomplete: more gradient-accumulation steps of this batch follow, so its gradients are not yet to be summed over dp.
    """

    incomplete: bool = False


@cache
def ddp_stage_class() -> type:
    """Return a PipelineStage class that has DDP sum the gradients in the last micro-batch of the last accumulation step.

    The class is made in a function, because importing torch's pipelining takes 1.2 s (it imports torch._dynamo).
    """
    from torch.distributed.pipelining import PipelineStage

    class DDPStage(PipelineStage):
        def __init__(self, *args: Any, accumulation: Accumulation, **options: Any):
            super().__init__(*args, **options)
            self.accumulation = accumulation

        def backward_maybe_with_nosync(
            self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
        ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
            complete = last_backward and not self.accumulation.incomplete
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, complete)

    return DDPStage


class DDPPipeline(Pipeline):
    """Several pipelines of `pp` ranks each. The other options are those of Pipeline.

    Args:
        pp: number of ranks in a pipeline; the ranks divided by it is the number of replicas.
        batch_norm: ranks over which BatchNorm computes its statistics in training: each rank by itself (local) or all ranks
            of the data parallelism together (sync).
    """

    def __init__(
        self,
        runtime: Runtime,
        pp: Count,
        schedule: Schedule,
        num_microbatches: Count,
        num_stages: Count | None,
        cut: list[str] | None,
        batch_norm: BatchNorm,
    ):
        super().__init__(runtime, schedule, num_microbatches, num_stages, cut)
        self.lay_out(pp=pp)
        self.batch_norm = batch_norm
        self.accumulation = Accumulation()

    def wrap(self, stage: Stage) -> nn.Module:
        set_batch_norm(stage, self.batch_norm, self.dp_group)
        device_ids = [self.device] if self.device.type == "cuda" else None
        wrapped = DistributedDataParallel(stage, device_ids=device_ids, process_group=self.dp_group)
        wrapped.broadcast_buffers = False
        return wrapped

    def make_stage(self, *args: Any, **options: Any) -> Any:
        return ddp_stage_class()(*args, accumulation=self.accumulation, **options)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        self.accumulation.incomplete = True
        try:
            yield
        finally:
            self.accumulation.incomplete = False

    def divisor(self, count: int) -> float:
        return count / self.dp_size  # DDP averages over dp
