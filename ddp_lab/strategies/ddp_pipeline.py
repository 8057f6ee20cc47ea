"""Data and pipeline parallelism: several pipelines run concurrently, each with its own local batch.

    dp 0: rank 0 -> rank 1        a (dp, pp) mesh of 2 x 2: activations and their gradients are sent along pp,
    dp 1: rank 2 -> rank 3        the parameters' gradients are summed along dp (ranks 0 and 2, ranks 1 and 3)

Every stage is wrapped in DistributedDataParallel, which sums its gradients over dp during the backward pass of the last
micro-batch.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn

from ddp_lab.config.types import BlockName, Count
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm
from ddp_lab.strategies.block_times import Balance
from ddp_lab.strategies.ddp import wrap
from ddp_lab.strategies.pipeline import Pipeline
from ddp_lab.strategies.stage import Stage
from ddp_lab.world.runtime import Runtime

# interleavedzerobubble is excluded: it computes the weights' gradients separately, without running DDP's hooks, so that the
# replicas silently diverge (seen in torch 2.11 and 2.15).
Schedule = Literal["gpipe", "1f1b", "interleaved1f1b", "loopedbfs"]


@dataclass
class Accumulation:
    """State that a strategy shares with its stages, which must not refer to the strategy: torch would keep it alive.

    Attributes:
        incomplete: whether more gradient-accumulation steps of this batch follow; only the last sums the gradients over dp.
    """

    incomplete: bool = False


@cache
def ddp_stage_class() -> type:
    """Return a PipelineStage class in which DDP sums the gradients in the last micro-batch of the last accumulation step.

    The class is defined in a function, because importing torch's pipelining takes 1.2 s (it imports torch._dynamo).
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


def make_ddp_stage(accumulation: Accumulation, *args: Any, **options: Any) -> Any:
    """Return torch's stage of a module that DDP wraps. The other arguments are those of PipelineStage."""
    return ddp_stage_class()(*args, accumulation=accumulation, **options)


class DDPPipeline(Pipeline):
    """Several pipelines of `pp` ranks each. The other options are those of Pipeline.

    Args:
        pp: number of ranks in a pipeline. The number of replicas is the number of ranks / pp.
        batch_norm: ranks over which BatchNorm computes its statistics in training: each rank separately (local), or all
            ranks that read different local batches together (sync).
    """

    def __init__(
        self,
        runtime: Runtime,
        pp: Count,
        schedule: Schedule,
        num_microbatches: Count,
        num_stages: Count | None,
        cut: list[BlockName] | None,
        batch_norm: BatchNorm,
        balance: Balance = "flops",
    ):
        super().__init__(runtime, schedule, num_microbatches, num_stages, cut, balance)
        self.lay_out(pp=pp)
        self.batch_norm = batch_norm
        self.accumulation = Accumulation()
        self.make_stage = partial(make_ddp_stage, self.accumulation)

    def place(self, stage: Stage) -> nn.Module:
        super().place(stage)
        set_batch_norm(stage, self.batch_norm, self.dp_group)
        if not any(parameter.requires_grad for parameter in stage.parameters()):
            return stage  # frozen: there is no gradient to sum, and DDP refuses such a module
        device_ids = [self.device] if self.device.type == "cuda" else None
        wrapped = wrap(stage, device_ids=device_ids, process_group=self.dp_group)
        wrapped.broadcast_buffers = False
        return wrapped

    @contextmanager
    def no_sync(self) -> Generator[None]:
        self.accumulation.incomplete = True
        try:
            yield
        finally:
            self.accumulation.incomplete = False

    def divisor(self, count: int) -> float:
        return count / self.dp_size  # DDP averages over dp
