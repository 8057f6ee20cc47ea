"""Pipeline parallelism: each rank holds one stage of the model; micro-batches pass through all.

    rank 0 | f1 f2 f3 f4             b1 b2 b3 b4        activations are sent down,
    rank 1 |    f1 f2 f3 f4       b1 b2 b3 b4           their gradients up,
    rank 2 |       f1 f2 f3 f4 b1 b2 b3 b4              parameters are never sent
           +------------------------------------> time

torch.distributed.pipelining runs the schedule, which decides when each micro-batch goes forward and
backward; the picture is that of gpipe. schedules.py describes the schedules.

A Chain is cut between its blocks, which stages.py runs. Any other module is cut by a trace
(traced.py).

A parameter that several stages use, such as tied embeddings, has a copy in each (stage_weights.py):

    with_first_names   it has the name of its first place, also where this rank has a later one
    sum_copies         its gradient is the sum of those of the copies, which stay bitwise equal
    counted_once       its gradient counts once in the norm
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from ddp_lab.data.trees import Tree
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.gradients import norm_over_stages
from ddp_lab.strategies.schedules import PipelineKeys, PipelinePlan
from ddp_lab.strategies.stage_forms import StageForms
from ddp_lab.strategies.stage_weights import StageWeights
from ddp_lab.strategies.stages import PipelineExecutor, blocks_of, make_stages
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:
    from ddp_lab.strategies.traced_model import TracedModel


class Pipeline(Strategy):
    """One pipeline over all ranks.

    Args:
        schedule: name of torch's pipeline schedule.
        num_microbatches: number of micro-batches that a batch is divided into.
        cut: names of the first blocks of the second stage, the third and so on, or paths of modules
            of a model that is no Chain; null cuts by FLOPs into one stage per rank, or two per rank
            with the interleaved schedules.

    Raises:
        ConfigError: in `partition`, the schedule does not support this number of ranks, stages or
            micro-batches, or the model cannot be cut into the stages.
    """

    cuts_model = True
    compiled_by_block = True
    supported_options = frozenset({"cuda_graph", "compile", "fused"})

    def __init__(
        self,
        runtime: Runtime,
        mesh_axes: Mapping[str, int] | None = None,
        **keys: Unpack[PipelineKeys],
    ):
        super().__init__(runtime, mesh_axes or {"pp": runtime.world_size})
        self.pp_rank = runtime.rank % self.axes["pp"]
        self.keys = keys
        self.num_microbatches = keys["num_microbatches"]
        self.traced: TracedModel | None = None  # of a model that is no Chain
        if "zerobubble" in keys["schedule"]:
            self.unsupported["compile"] = (
                f"strategy.schedule={keys['schedule']} cuts the backward pass in two, and that of "
                "a compiled block is one"
            )

    def partition(self, model: nn.Module, samples: int) -> None:
        self.calls_blocks = isinstance(model, Chain)
        super().partition(model, samples)
        if isinstance(model, Chain):
            self.plan = PipelinePlan.make(self.keys, model, self.axes["pp"], samples)
            self.weights = StageWeights.of_chain(model, self.plan, self.name)
            self.forms = StageForms(model, self.plan, samples, self.runtime.precision)
        else:
            from ddp_lab.strategies.traced_model import UNSUPPORTED_BY_TRACES, cut_by_trace

            self.traced = cut_by_trace(self, model, samples)
            self.unsupported |= UNSUPPORTED_BY_TRACES
            self.plan = self.traced.plan
            self.weights = self.traced.weights
        self.bubble = self.plan.bubble

    def setup(self, model: nn.Module) -> None:
        mesh = self.runtime.mesh(self.axes)
        self.dp_group = mesh.get_group("dp")
        self.pp_group = mesh.get_group("pp")
        if self.traced is not None:
            self.module = self.traced.place(model, self.to_device)
            self.executor = self.traced.executor(self.module, self.pp_group, self.task)
        else:
            assert isinstance(model, Chain)  # `partition`
            stages = make_stages(
                model, self.plan, self.pp_rank, self.runtime.precision, self.autocast
            )
            for stage in stages.values():
                self.to_device(stage)
            self.module = self.weights.with_first_names(blocks_of(stages))
            self.executor = PipelineExecutor(
                plan=self.plan,
                stages=stages,
                forms=self.forms,
                group=self.pp_group,
                task=self.task,
                device=self.device,
            )
        self.is_metric_rank = self.executor.has_loss

    def describe(self) -> str:
        where = self.plan.parts.describe(
            [f"pp rank {stage % self.plan.ranks}" for stage in range(self.plan.num_stages)]
        )
        return f"{self.name}: {where}, {self.plan.describe()}"

    def add_gradient(
        self, inputs: Tree, targets: Tree, num_valid: int, divisor: float | torch.Tensor
    ) -> torch.Tensor:
        self.require_inputs(inputs)
        return self.executor.add_gradient(inputs, targets, num_valid, divisor, self.measure)

    def reduce_gradients(self) -> None:
        assert self.pp_group is not None
        self.weights.sum_copies(self.module, self.pp_rank, self.pp_group)

    def predict(self, inputs: Tree) -> Any:
        self.require_inputs(inputs)
        return self.executor.predict(inputs)

    def require_called_hooks(self, model: nn.Module) -> None:
        if self.traced is not None:
            from ddp_lab.strategies.traced_model import require_traceable

            require_traceable(model, self.name)
        super().require_called_hooks(model)

    def counted_parameters(self) -> Iterable[nn.Parameter]:
        return self.weights.counted_once(self.module, self.pp_rank)

    def gradient_norm(self) -> torch.Tensor:
        return norm_over_stages(super().gradient_norm(), self.pp_group)
