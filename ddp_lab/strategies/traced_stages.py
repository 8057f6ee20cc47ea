"""Runs batches through the stages of a module that is cut by a trace, in micro-batches."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ddp_lab.data.trees import Tree, rows, size
from ddp_lab.models.boundaries import Form
from ddp_lab.models.calls import arguments_of
from ddp_lab.models.cut_points import CutPoints
from ddp_lab.strategies.schedules import PipelinePlan, has_one_stage
from ddp_lab.strategies.stage_shapes import StageShapes
from ddp_lab.strategies.stages import unwrapped
from ddp_lab.strategies.traced import Blueprint, Traced, bind
from ddp_lab.tasks.base import Task, measure, width


class Ready(NamedTuple):
    """What runs the micro-batches of one form, in one mode.

    Attributes:
        schedule: torch's, of this rank.
        outputs: of a micro-batch, without data.
        form: of the outputs.
        samples: in a micro-batch.
    """

    schedule: Any
    outputs: list[torch.Tensor]
    form: Any
    samples: int


class TracedExecutor:
    """Like PipelineExecutor, for inputs and outputs of several tensors.

    Args:
        plan: of the pipeline.
        blueprint: of the model.
        model: this rank's part of it, on the device.
        rank: number of this rank in the pipeline.
        group: the ranks of the pipeline.
        task: with the training loss.
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
        self.plan = plan
        self.blueprint = blueprint
        self.model = model
        assert isinstance(plan.parts, CutPoints)
        self.starts = plan.parts.starts
        self.indices = range(rank, plan.num_stages, plan.ranks)
        self.group = group
        self.task = task
        self.has_loss = plan.num_stages - 1 in self.indices
        self._shapes = StageShapes(plan.num_microbatches)
        self._ready: dict[Any, Ready] = {}
        self._targets: Tree = None
        self._form: Any = None  # of the outputs in this step
        self._divisor = 1.0
        self._left = 0  # samples without padding in the micro-batches that follow
        self._results: list[torch.Tensor] = []  # the sums of each micro-batch so far

    def add_gradient(
        self, inputs: Tree, targets: Tree, num_valid: int, divisor: float
    ) -> torch.Tensor:
        """Add the gradient of a batch to `.grad`, as `Strategy.add_gradient`.

        Only the last rank returns sums above 0.
        """
        ready, repeated = self._prepare(inputs, training=True)
        self._divisor = divisor
        self._left = num_valid
        self._results = []
        self._form = ready.form
        self._targets = targets
        # torch divides one tensor: the micro-batches get the numbers of their rows
        expected = repeated if self.has_loss else None
        arguments = self._arguments(inputs, repeated)
        with unwrapped():
            ready.schedule.step(*arguments, target=expected, return_outputs=False)
        if self.has_loss:
            return reduce(torch.add, self._results)
        return torch.zeros(width(self.task), dtype=torch.float64, device=self.blueprint.device)

    def _loss(self, outputs: Any, expected: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next micro-batch, on the last stage, and keep its sums.

        Args:
            outputs: the tensors of the micro-batch.
            expected: the rows of its targets.
        """
        num_valid = min(self._left, len(expected))
        self._left -= num_valid
        tensors = [outputs] if isinstance(outputs, torch.Tensor) else [*outputs]
        kept = max(num_valid, 1)  # `measure` cannot cut padding from all outputs
        whole = tree_unflatten([tensor[:kept] for tensor in tensors], self._form)
        targets = rows(self._targets, expected[:kept])
        loss, results = measure(self.task, whole, targets, num_valid, self._divisor)
        self._results.append(results)
        return loss

    @torch.no_grad()
    def predict(self, inputs: Tree) -> Any:
        """Return the outputs, of which every tensor is [b, ...], on all ranks of the pipeline.

        The last rank computes and broadcasts them.
        """
        ready, repeated = self._prepare(inputs, training=False)
        found = ready.schedule.step(*self._arguments(inputs, repeated))
        tensors = [found] if isinstance(found, torch.Tensor) else [*(found or ())]
        if not self.has_loss:
            number = ready.samples * self.plan.num_microbatches
            tensors = [
                torch.empty(number, *like.shape[1:], dtype=like.dtype, device=self.blueprint.device)
                for like in ready.outputs
            ]
        for place, tensor in enumerate(tensors):
            tensors[place] = tensor.contiguous()
            dist.broadcast(tensors[place], group=self.group, group_src=self.plan.ranks - 1)
        own = size(inputs)
        return tree_unflatten([tensor[:own] for tensor in tensors], ready.form)

    def _arguments(self, inputs: Tree, repeated: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors of the padded inputs on the first rank, and nothing on the others."""
        if 0 not in self.indices:
            return ()
        tensors, _ = tree_flatten(arguments_of(rows(inputs, repeated)))
        return tuple(tensors)

    def _prepare(self, inputs: Tree, training: bool) -> tuple[Ready, torch.Tensor]:
        """Return a schedule for a batch, and the row of it that each row of the padded one repeats.

        All ranks of the pipeline get the same batch.

        Raises:
            ConfigError: the model cannot be traced, or it is the first batch of too many shapes.
        """
        tensors, form = tree_flatten(arguments_of(inputs))
        sample = tuple(Form(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors)
        text = ", ".join(map(str, sample))
        samples = self._shapes.samples((sample, str(form)), text, size(inputs), training)
        key = (sample, str(form), samples, training)
        if key not in self._ready:
            like = self.blueprint.inputs(inputs, samples)
            traced = self.blueprint.trace(like, self.starts, training)
            schedule = self._make_schedule(traced, training)
            self._ready[key] = Ready(schedule, traced.outputs, traced.form, samples)
        number = samples * self.plan.num_microbatches
        repeated = torch.arange(number, device=self.blueprint.device) % size(inputs)
        return self._ready[key], repeated

    def _make_schedule(self, traced: Traced, training: bool) -> Any:
        """Return torch's schedule for the stages of a trace. Its first step is collective."""
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        stages: list[Any] = []
        for index in self.indices:
            stage = traced.stages[index]
            bind(stage.graph, self.model, self.blueprint.device)
            stages.append(
                PipelineStage(
                    stage,
                    index,
                    self.plan.num_stages,
                    self.blueprint.device,
                    input_args=examples_of(stage.inputs, index > 0),
                    output_args=examples_of(stage.outputs, True),
                    group=self.group,
                )
            )
        make_schedule = cast("Callable[..., Any]", get_schedule_class(self.plan.schedule))
        return make_schedule(
            stages[0] if has_one_stage(self.plan.schedule) else stages,
            self.plan.num_microbatches,
            loss_fn=self._loss if training else None,
            scale_grads=False,
        )


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
