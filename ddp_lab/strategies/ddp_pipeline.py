"""Data and model split together: several pipelines side by side, each on its own share of every batch.

    dp 0: rank 0 -> rank 1        a mesh (dp, pp) of 2 x 2. Along pp travel activations and their gradients,
    dp 1: rank 2 -> rank 3        along dp the parameters' gradients: 0 with 2 and 1 with 3 hold the same stage.

A pipeline with DistributedDataParallel around every stage: it sums the gradients over dp while the last micro-batch is still
going backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lab.config.types import Count
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm
from ddp_lab.strategies.pipeline import Pipeline, Stage
from ddp_lab.world.runtime import Runtime

# Without interleavedzerobubble: it computes the weights' gradients apart, where DDP's hooks miss them, and the replicas drift
# apart without a word (seen in torch 2.11 and 2.15).
Schedule = Literal["gpipe", "1f1b", "interleaved1f1b", "loopedbfs"]


@dataclass
class Accumulation:
    """What a strategy tells its stages about the batch. Not the strategy itself: the schedules would keep that alive.

    Attributes:
        more_to_come: the micro-batches of this step are not the batch's last ones, so its gradients are not complete.
    """

    more_to_come: bool = False


@cache
def ddp_stage_class() -> type:
    """Return a PipelineStage that has DDP sum the gradients after the last micro-batch, unless more of the batch is to come.

    A function makes the class, because importing torch's pipelining takes 1.2 s (it imports torch._dynamo).
    """
    from torch.distributed.pipelining import PipelineStage

    class DDPStage(PipelineStage):
        def __init__(self, *args: Any, accumulation: Accumulation, **options: Any):
            super().__init__(*args, **options)
            self.accumulation = accumulation

        def backward_maybe_with_nosync(self, backward_type, bwd_kwargs, last_backward=False):
            complete = last_backward and not self.accumulation.more_to_come
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, complete)

    return DDPStage


class DDPPipeline(Pipeline):
    """Pipelines of `pp` ranks, as many as there are ranks for. The other options are those of Pipeline.

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
    def no_sync(self) -> Iterator[None]:
        self.accumulation.more_to_come = True
        try:
            yield
        finally:
            self.accumulation.more_to_come = False

    def divisor(self, count: int) -> float:
        return count / self.dp_size  # DDP averages over dp
