"""The stages of a pipeline that a rank has of a Chain, and what runs micro-batches through them."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten

from ddp_lab.config.errors import TrainingError
from ddp_lab.data.trees import Tree
from ddp_lab.models.boundaries import Form
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.executor import Executor, Prepared
from ddp_lab.strategies.schedules import PipelinePlan
from ddp_lab.strategies.stage_forms import StageForms
from ddp_lab.tasks.base import Task
from ddp_lab.world.device import half_dtype

_, ONE_TENSOR = tree_flatten(torch.empty(0))  # the form of outputs that are one tensor


class Stage(Chain):
    """Consecutive blocks of the model.

    Args:
        blocks: the blocks by name.
        precision: float32; or bf16 or fp16, in which the output is cast to the dtype in which it is
            sent.
        autocast: returns the context of the forward pass.

    Attributes:
        output_form: what it returns for the micro-batches of this step. The next rank has allocated
            its receive buffers accordingly. None: it returns the model's outputs, which are sent to
            no one.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        precision: str,
        autocast: Callable[[], AbstractContextManager[object]],
    ):
        super().__init__((), **blocks)
        self.sent_dtype = half_dtype(precision)
        self.outside = torch.get_default_dtype()
        self.autocast = autocast
        self.output_form: Form | None = None

    def return_form(self, form: Form | None) -> None:
        """Expect outputs of this form from now on, as `output_form`."""
        self.output_form = form

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.requires_grad and input.is_leaf:
            # It was received, and its gradient will be sent back. The first block may be an
            # activation that changes it in place, which autograd refuses for a leaf. That costs a
            # copy, which takes far less time than receiving it.
            input = input.clone()
        with self.autocast():
            output = super().forward(input)
            if self.sent_dtype is not None:
                output = output.to(self.output_form.dtype if self.output_form else self.outside)
            output = output.contiguous()  # as sending requires

        if self.output_form is not None and Form.of(output) != self.output_form:
            names = [name for name, _ in self.named_children()]
            raise TrainingError(
                f"{names[-1]} returned {Form.of(output)}, but {self.output_form} was computed for "
                "the inputs of this step and expected by the next stage. The shapes of a model "
                "under a pipeline must not depend on values, nor on whether it is trained or "
                "evaluated. Use another strategy, for example ddp"
            )

        # torch 2.11 cannot cut the backward pass of a stage in two if the stage returns its own
        # input.
        return output.clone() if output is input else output


def make_stages(
    model: Chain,
    plan: PipelinePlan,
    rank: int,
    precision: str,
    autocast: Callable[[], AbstractContextManager[object]],
) -> dict[int, Stage]:
    """Return the stages of a rank of the pipeline by their index. They share the blocks of `model`.

    Args:
        precision, autocast: as in `Stage`.
    """
    blocks = list(model.named_children())
    return {
        index: Stage(dict(blocks[i] for i in plan.parts.parts[index]), precision, autocast)
        for index in range(rank, plan.num_stages, plan.ranks)
    }


def blocks_of(stages: Mapping[int, nn.Module]) -> nn.Module:
    """Return a module of all blocks of the stages, by their names in the model."""
    return nn.Sequential(
        OrderedDict(block for stage in stages.values() for block in stage.named_children())
    )


class PipelineExecutor(Executor):
    """Runs batches of one tensor through the stages of a Chain.

    Args:
        plan: of the pipeline.
        stages: this rank's stages by their index in the pipeline, on the device.
        forms: what all stages get and return.
        group, task, device: as in `Executor`.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        stages: Mapping[int, Stage],
        forms: StageForms,
        group: dist.ProcessGroup,
        task: Task,
        device: torch.device,
    ):
        super().__init__(plan, stages.keys(), group, task, device)
        self.stages = stages
        self.forms = forms
        self._schedules: dict[tuple[Form, bool], Any] = {}

    @property
    def order(self) -> dict[int, list[str]]:
        """The actions of each rank by torch's names, as "1F0", in the first training step."""
        schedule = next(prepared for (_, training), prepared in self._schedules.items() if training)
        if hasattr(schedule, "pipeline_order"):
            order = schedule.pipeline_order
        else:
            order = schedule._get_pipeline_order()
        return {rank: [str(action) for action in actions] for rank, actions in order.items()}

    def prepare(self, inputs: Tree, training: bool) -> Prepared:
        assert isinstance(inputs, torch.Tensor)  # `Strategy.require_inputs`
        form = self._micro_batch(inputs, training)
        forms = self.forms.of(form)
        if (form, training) not in self._schedules:
            self._schedules[form, training] = self._make_schedule(forms, training)
        for index, stage in self.stages.items():
            stage.return_form(forms[index + 1])
        padded = form.shape[0] * self.plan.num_microbatches
        rows = torch.arange(padded, device=inputs.device) % len(inputs)
        arguments = (inputs[rows],) if 0 in self.stages else ()
        outputs = [example_of(forms[-1], requires_grad=False)]
        return Prepared(self._schedules[form, training], rows, arguments, outputs, ONE_TENSOR)

    def _micro_batch(self, inputs: torch.Tensor, training: bool) -> Form:
        """Return the form of a micro-batch of the inputs.

        Raises:
            ConfigError: too many other shapes or dtypes of a sample have occurred.
        """
        sample = Form(tuple(inputs.shape[1:]), inputs.dtype)
        samples = self.shapes.samples(sample, str(sample), len(inputs), training)
        return Form((samples, *sample.shape), sample.dtype)

    def _make_schedule(self, forms: list[Form], training: bool) -> Any:
        """Return torch's schedule for micro-batches whose forms are from `StageForms.of`."""
        stages = [
            self.make_stage(
                index,
                stage,
                (example_of(forms[index], requires_grad=index > 0),),
                (example_of(forms[index + 1], requires_grad=True),),
            )
            for index, stage in self.stages.items()
        ]
        return self.make_schedule(stages, training)


def example_of(form: Form, requires_grad: bool) -> torch.Tensor:
    """Return a tensor of a form on the meta device, as an example of a stage's input or output."""
    return torch.empty(form.shape, dtype=form.dtype, device="meta", requires_grad=requires_grad)
