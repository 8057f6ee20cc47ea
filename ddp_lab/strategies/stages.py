"""The stages of a pipeline that a rank holds, and torch's schedules, which run micro-batches through them.

torch's pipelining is imported where it is used, because that takes 1.2 s (it imports torch._dynamo).
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import reduce
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.models.chain import Chain
from ddp_lab.strategies.schedules import PipelinePlan, has_one_stage
from ddp_lab.tasks.base import Task, measure, width


class Stage(Chain):
    """Consecutive blocks of the model.

    Args:
        blocks: the blocks by name.
        inputs, outputs: what it gets and returns for one sample, on the meta device. The next rank has allocated its receive
            buffers accordingly.
        autocast: returns the context of the forward pass.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        inputs: torch.Tensor,
        outputs: torch.Tensor,
        autocast: Callable[[], AbstractContextManager[object]],
    ):
        super().__init__(tuple(inputs.shape[1:]), **blocks)
        self.inputs, self.outputs, self.autocast = inputs, outputs, autocast

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            output = super().forward(input)
            output = output.to(self.outputs.dtype).contiguous()  # as sending requires
            # torch 2.11 cannot cut the backward pass of a stage in two if the stage returns its own input.
            return output.clone() if output is input else output


def make_stages(
    model: Chain, plan: PipelinePlan, rank: int, precision: str, autocast: Callable[[], AbstractContextManager[object]]
) -> dict[int, Stage]:
    """Return the stages of a rank of the pipeline by their index. They share the blocks of `model`.

    Args:
        precision: float32, in which all activations are sent; or bf16, in which all but the inputs and the outputs are.
        autocast: as in `Stage`.
    """
    blocks, shapes, outside = list(model.named_children()), plan.parts.shapes, torch.get_default_dtype()
    between = torch.bfloat16 if precision == "bf16" else outside
    at = [*(shapes[part.start] for part in plan.parts.parts), shapes[-1]]
    dtypes = [model.input_dtype or outside, *[between] * (len(at) - 2), outside]
    boundaries = [torch.empty(1, *shape, dtype=dtype, device="meta") for shape, dtype in zip(at, dtypes, strict=True)]
    return {
        index: Stage(dict(blocks[i] for i in plan.parts.parts[index]), boundaries[index], boundaries[index + 1], autocast)
        for index in range(rank, plan.num_stages, plan.ranks)
    }


def blocks_of(stages: Mapping[int, nn.Module]) -> nn.Module:
    """Return a module of all blocks of the stages, by their names in the model."""
    return nn.Sequential(OrderedDict(block for stage in stages.values() for block in stage.named_children()))


class PipelineExecutor:
    """Runs batches through the stages of a pipeline, in micro-batches.

    A schedule of torch has static shapes. There is therefore one for each size of a micro-batch, of which a partial last batch
    has its own; training and evaluation have separate ones, because only training computes a loss. They are made when they are
    first used. torch keeps them alive, so they must not refer to a strategy.

    Args:
        plan: of the pipeline.
        stages: this rank's stages by their index in the pipeline, on the device.
        group: the ranks of the pipeline.
        task: with the training loss.
        device: of this rank.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        stages: Mapping[int, Stage],
        group: dist.ProcessGroup,
        task: Task,
        device: torch.device,
    ):
        self.plan, self.stages, self.group, self.device = plan, stages, group, device
        self.task, self._divisor, self._left = task, 1.0, 0  # samples without padding in the micro-batches that follow
        self._results: list[torch.Tensor] = []  # the sums of each micro-batch so far
        self.has_loss = plan.num_stages - 1 in stages
        self._schedules: dict[tuple[int, bool], Any] = {}

    @property
    def order(self) -> dict[int, list[str]]:
        """The actions of each rank by torch's names, as "1F0", in the first training step."""
        schedule = next(made for (_, training), made in self._schedules.items() if training)
        order = schedule.pipeline_order if hasattr(schedule, "pipeline_order") else schedule._get_pipeline_order()
        return {rank: [str(action) for action in actions] for rank, actions in order.items()}

    def add_gradient(self, inputs: torch.Tensor, targets: torch.Tensor, real: int, divisor: float) -> torch.Tensor:
        """Add the gradient of a batch to `.grad`, as `Strategy.add_gradient`; only the last rank returns sums above 0."""
        schedule, rows, arguments = self._prepare(inputs, training=True)
        self._divisor, self._left, self._results = divisor, real, []
        schedule.step(*arguments, target=targets[rows] if self.has_loss else None, return_outputs=False)
        if self.has_loss:
            return reduce(torch.add, self._results)
        return torch.zeros(width(self.task), dtype=torch.float64, device=self.device)

    def _loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next micro-batch, on the last stage, and keep its sums."""
        real = min(self._left, len(targets))
        self._left -= real
        loss, results = measure(self.task, outputs, targets, real, self._divisor)
        self._results.append(results)
        return loss

    @torch.no_grad()
    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits, [b, classes], on all ranks of the pipeline: the last rank computes and broadcasts them."""
        schedule, rows, arguments = self._prepare(inputs, training=False)
        logits = schedule.step(*arguments)
        if logits is None:  # on all ranks but the last
            logits = torch.empty(len(rows), *self.plan.parts.shapes[-1], device=self.device)
        dist.broadcast(logits, group=self.group, group_src=self.plan.ranks - 1)
        return logits[: len(inputs)]

    def _prepare(self, inputs: torch.Tensor, training: bool) -> tuple[Any, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Pad a batch, [b, channels, height, width], so that it can be divided into equal micro-batches.

        Returns:
            The schedule for it; the row of the batch that each row of the padded batch repeats, [padded]; and the arguments
            of the schedule on this rank, which are the padded inputs on the first rank and nothing on the others.
        """
        size = -(-len(inputs) // self.plan.num_microbatches)
        rows = torch.arange(size * self.plan.num_microbatches, device=inputs.device) % len(inputs)
        if (size, training) not in self._schedules:
            self._schedules[size, training] = self._make_schedule(size, training)
        return self._schedules[size, training], rows, (inputs[rows],) if 0 in self.stages else ()

    def _make_schedule(self, size: int, training: bool) -> Any:
        """Return torch's schedule for micro-batches of `size` samples."""
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        stages = [
            PipelineStage(
                stage,
                index,
                self.plan.num_stages,
                self.device,
                input_args=stage.inputs.new_empty(size, *stage.inputs.shape[1:], requires_grad=index > 0),
                output_args=stage.outputs.new_empty(size, *stage.outputs.shape[1:], requires_grad=True),
                group=self.group,
            )
            for index, stage in self.stages.items()
        ]
        make_schedule = cast("Callable[..., Any]", get_schedule_class(self.plan.schedule))
        return make_schedule(
            stages[0] if has_one_stage(self.plan.schedule) else stages,
            self.plan.num_microbatches,
            loss_fn=self._loss if training else None,
            scale_grads=False,
        )
