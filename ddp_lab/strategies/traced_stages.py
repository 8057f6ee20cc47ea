"""Runs batches through the stages of a module that is cut by a trace, in micro-batches."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from ddp_lab.data.trees import Tree, rows, size
from ddp_lab.models.calls import arguments_of
from ddp_lab.models.cut_points import CutPoints
from ddp_lab.strategies.executor import Executor, Prepared
from ddp_lab.strategies.schedules import PipelinePlan
from ddp_lab.strategies.stage_shapes import BatchKey
from ddp_lab.strategies.traced import Blueprint, Traced, bind
from ddp_lab.strategies.traced_values import TracedStage
from ddp_lab.tasks.base import Task


class TracedSchedule(NamedTuple):
    """What runs the micro-batches of one form, in one mode.

    Attributes:
        schedule: torch's, of this rank.
        outputs: of a micro-batch, without data.
        form: of the outputs.
    """

    schedule: Any
    outputs: list[torch.Tensor]
    form: TreeSpec


class InPrecision(nn.Module):
    """A stage whose forward pass runs in a context, which a trace does not contain.

    Args:
        stage: of a trace.
        autocast: returns the context.
    """

    def __init__(self, stage: TracedStage, autocast: Callable[[], AbstractContextManager[object]]):
        super().__init__()
        self.stage = stage
        self.autocast = autocast

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self.autocast():
            return self.stage(*tensors)


class TracedExecutor(Executor):
    """Runs batches of any inputs and outputs through the stages of a trace.

    Args:
        plan: of the pipeline.
        blueprint: of the model.
        model: this rank's part of it, on the device.
        rank: number of this rank in the pipeline.
        group, task: as in `Executor`.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        blueprint: Blueprint,
        model: nn.Module,
        rank: int,
        group: dist.ProcessGroup,
        task: Task,
    ):
        indices = range(rank, plan.num_stages, plan.ranks)
        super().__init__(plan, indices, group, task, blueprint.device)
        self.blueprint = blueprint
        self.model = model
        assert isinstance(plan.parts, CutPoints)
        self.starts = plan.parts.starts
        self._schedules: dict[BatchKey, TracedSchedule] = {}

    def for_loss(self, outputs: Any, expected: torch.Tensor, num_valid: int) -> Any:
        num_rows = max(num_valid, 1)  # `measure` cannot cut padding from all outputs
        tensors = [tensor[:num_rows] for tensor in tree_leaves(outputs)]
        assert self._form is not None
        return tree_unflatten(tensors, self._form), expected[:num_rows]

    def prepare(self, inputs: Tree, training: bool) -> Prepared:
        key = self.shapes.key_of(inputs, training)
        if key not in self._schedules:
            like = self.blueprint.inputs(inputs, key.samples)
            traced = self.blueprint.trace(like, self.starts, training)
            schedule = self._make_schedule(traced, training)
            self._schedules[key] = TracedSchedule(schedule, traced.outputs, traced.form)
        prepared = self._schedules[key]
        padded = key.samples * self.plan.num_microbatches
        repeated = torch.arange(padded, device=self.device) % size(inputs)
        arguments: tuple[torch.Tensor, ...] = ()
        if 0 in self.indices:
            arguments = tuple(tree_leaves(arguments_of(rows(inputs, repeated))))
        return Prepared(prepared.schedule, repeated, arguments, prepared.outputs, prepared.form)

    def _make_schedule(self, traced: Traced, training: bool) -> Any:
        """Return torch's schedule for the stages of a trace."""
        stages: list[Any] = []
        for index in self.indices:
            stage = traced.stages[index]
            bind(stage.graph, self.model, self.device)
            inputs = examples_of(stage.inputs, index > 0)
            outputs = examples_of(stage.outputs, True)
            module = InPrecision(stage, self.blueprint.autocast)
            stages.append(self.make_stage(index, module, inputs, outputs))
        return self.make_schedule(stages, training)


def examples_of(tensors: Sequence[torch.Tensor], requires_grad: bool) -> tuple[torch.Tensor, ...]:
    """Return tensors on the meta device, as examples of what a stage gets or returns."""
    return tuple(
        torch.empty(
            tensor.shape,
            dtype=tensor.dtype,
            device="meta",
            requires_grad=requires_grad and tensor.is_floating_point(),
        )
        for tensor in tensors
    )
