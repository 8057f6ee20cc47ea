"""Data and pipeline parallelism: several pipelines run concurrently, each with its own local batch.

    dp 0: rank 0 -> rank 1        a (dp, pp) mesh of 2 x 2
    dp 1: rank 2 -> rank 3

Activations and their gradients are sent along pp. The parameters' gradients are summed along dp,
here over ranks 0 and 2 and over ranks 1 and 3: those of a stage in one collective after the last
micro-batch.
"""

from functools import partial
from typing import Unpack

from torch import nn

from ddp_lab.config.types import Count
from ddp_lab.strategies.all_reduce import flat
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm
from ddp_lab.strategies.gradients import sum_gradients
from ddp_lab.strategies.pipeline import Pipeline
from ddp_lab.strategies.schedules import PipelineKeys
from ddp_lab.strategies.unused import every_gradient
from ddp_lab.world.runtime import Runtime


class DDPPipeline(Pipeline):
    """Several pipelines of `pp` ranks each. The other options are those of Pipeline.

    Args:
        pp: number of ranks in a pipeline. The number of replicas is the number of ranks / pp.
    """

    def __init__(
        self, runtime: Runtime, pp: Count, batch_norm: BatchNorm, **keys: Unpack[PipelineKeys]
    ):
        super().__init__(runtime, {"pp": pp}, **keys)
        self.batch_norm = batch_norm

    def setup(self, model: nn.Module) -> None:
        super().setup(model)
        if self.traced is None:
            set_batch_norm(self.module, self.batch_norm, self.dp_group)

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        if self.dp_size > 1:
            with every_gradient(self):
                sum_gradients(self.module.parameters(), partial(flat, group=self.dp_group))
