"""The stages of a pipeline of a rank, and torch's schedules, which run micro-batches through them.

torch's pipelining is imported where it is used, because that takes 1.2 s (it imports
torch._dynamo).
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.config.errors import TrainingError
from ddp_lab.data.trees import Tree, rows
from ddp_lab.models.boundaries import Form
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.schedules import PipelinePlan, has_one_stage
from ddp_lab.strategies.stage_forms import StageForms
from ddp_lab.strategies.stage_shapes import StageShapes
from ddp_lab.tasks.base import Task, measure, width


class Stage(Chain):
    """Consecutive blocks of the model.

    Args:
        blocks: the blocks by name.
        precision: float32, or bf16, in which the output is cast to the dtype in which it is sent.
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
        self.is_bf16 = precision == "bf16"
        self.outside = torch.get_default_dtype()
        self.autocast = autocast
        self.output_form: Form | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.requires_grad and input.is_leaf:
            # It was received, and its gradient will be sent back. The first block may be an
            # activation that changes it in place, which autograd refuses for a leaf. That costs a
            # copy, which takes far less time than receiving it.
            input = input.clone()
        with self.autocast():
            output = super().forward(input)
            if self.is_bf16:
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


class Prepared(NamedTuple):
    """A batch that has been padded, so that it can be divided into equal micro-batches.

    Attributes:
        schedule: torch's, for its micro-batches.
        rows: the row of the batch that each row of the padded batch repeats, [padded].
        arguments: of the schedule on this rank: the padded inputs on the first rank, and nothing on
            the others.
        outputs: form of the model's outputs for a micro-batch.
    """

    schedule: Any
    rows: torch.Tensor
    arguments: tuple[torch.Tensor, ...]
    outputs: Form


class PipelineExecutor:
    """Runs batches through the stages of a pipeline, in micro-batches.

    A schedule of torch has static shapes. There is therefore one for each form of a micro-batch:
    for each shape and dtype of a sample, and for each number of samples, of which a partial last
    batch has its own. Training and evaluation have separate ones, because only training computes a
    loss. They are made when they are first used, which takes one small collective. torch keeps them
    alive, so they must not refer to a strategy. With torch 2.11 each keeps the receive buffers of
    all its micro-batches: a local batch of the activations that the rank's stages receive, and in
    training another one of their gradients. With torch 2.15 buffers are allocated when they are
    needed, and a schedule keeps only its plan.

    Args:
        plan: of the pipeline.
        stages: this rank's stages by their index in the pipeline, on the device.
        forms: what all stages get and return.
        group: the ranks of the pipeline.
        task: with the training loss.
        device: of this rank.
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
        self.plan = plan
        self.stages = stages
        self.forms = forms
        self.group = group
        self.device = device
        self._targets: Tree = torch.empty(0)  # of the batch, if they are no tensor
        self.task = task
        self._divisor = 1.0
        self._left = 0  # samples without padding in the micro-batches that follow
        self._results: list[torch.Tensor] = []  # the sums of each micro-batch so far
        self.has_loss = plan.num_stages - 1 in stages
        self._schedules: dict[tuple[Form, bool], Any] = {}
        self._shapes = StageShapes(plan.num_microbatches)

    @property
    def order(self) -> dict[int, list[str]]:
        """The actions of each rank by torch's names, as "1F0", in the first training step."""
        schedule = next(prepared for (_, training), prepared in self._schedules.items() if training)
        if hasattr(schedule, "pipeline_order"):
            order = schedule.pipeline_order
        else:
            order = schedule._get_pipeline_order()
        return {rank: [str(action) for action in actions] for rank, actions in order.items()}

    def add_gradient(
        self, inputs: Tree, targets: Tree, num_valid: int, divisor: float
    ) -> torch.Tensor:
        """Add the gradient of a batch to `.grad`, as `Strategy.add_gradient`.

        Only the last rank returns sums above 0.
        """
        assert isinstance(inputs, torch.Tensor)  # `Strategy.require_inputs`
        batch = self._prepare(inputs, training=True)
        self._divisor = divisor
        self._left = num_valid
        self._results = []
        expected = None
        # torch divides a tensor only: of other targets the micro-batches get the numbers of their
        # rows
        if self.has_loss:
            self._targets = targets
            expected = targets[batch.rows] if isinstance(targets, torch.Tensor) else batch.rows

        with unwrapped():
            batch.schedule.step(*batch.arguments, target=expected, return_outputs=False)
        if self.has_loss:
            return reduce(torch.add, self._results)
        return torch.zeros(width(self.task), dtype=torch.float64, device=self.device)

    def _loss(self, outputs: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next micro-batch, on the last stage, and keep its sums.

        Args:
            outputs: of the micro-batch.
            expected: its targets; or their rows, where the targets are no tensor.
        """
        num_valid = min(self._left, len(expected))
        self._left -= num_valid
        if isinstance(self._targets, torch.Tensor):
            targets = expected
        else:
            targets = rows(self._targets, expected)
        loss, results = measure(self.task, outputs, targets, num_valid, self._divisor)
        self._results.append(results)
        return loss

    @torch.no_grad()
    def predict(self, inputs: Tree) -> torch.Tensor:
        """Return the logits, [b, classes], on all ranks of the pipeline.

        The last rank computes and broadcasts them.
        """
        assert isinstance(inputs, torch.Tensor)
        batch = self._prepare(inputs, training=False)
        with unwrapped():
            logits = batch.schedule.step(*batch.arguments)
        if logits is None:  # on all ranks but the last
            rows, *others = batch.outputs.shape
            shape = rows * self.plan.num_microbatches, *others
            logits = torch.empty(shape, dtype=batch.outputs.dtype, device=self.device)
        dist.broadcast(logits, group=self.group, group_src=self.plan.ranks - 1)
        return logits[: len(inputs)]

    def _prepare(self, inputs: torch.Tensor, training: bool) -> Prepared:
        """Pad a batch, [b, ...], and let the stages expect its micro-batches.

        All ranks of the pipeline get the same batch.

        Raises:
            ConfigError: the model does not support it, or it is the first one of too many shapes.
        """
        form = self._micro_batch(inputs, training)
        forms = self.forms.of(form)
        if (form, training) not in self._schedules:
            self._schedules[form, training] = self._make_schedule(forms, training)
        for index, stage in self.stages.items():
            stage.output_form = forms[index + 1]
        padded = form.shape[0] * self.plan.num_microbatches
        rows = torch.arange(padded, device=inputs.device) % len(inputs)
        arguments = (inputs[rows],) if 0 in self.stages else ()
        return Prepared(self._schedules[form, training], rows, arguments, forms[-1])

    def _micro_batch(self, inputs: torch.Tensor, training: bool) -> Form:
        """Return the form of a micro-batch of the inputs.

        Raises:
            ConfigError: too many other shapes or dtypes of a sample have occurred.
        """
        sample = Form(tuple(inputs.shape[1:]), inputs.dtype)
        samples = self._shapes.samples(sample, str(sample), len(inputs), training)
        return Form((samples, *sample.shape), sample.dtype)

    def _make_schedule(self, forms: list[Form], training: bool) -> Any:
        """Return torch's schedule for micro-batches of a form. The first step of it is collective.

        Args:
            forms: from `StageForms.of`.
        """
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        stages = [
            PipelineStage(
                stage,
                index,
                self.plan.num_stages,
                self.device,
                input_args=example_of(forms[index], requires_grad=index > 0),
                output_args=example_of(forms[index + 1], requires_grad=True),
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


@contextmanager
def unwrapped() -> Generator[None]:
    """Raise the TrainingError of a stage in place of torch's error about the stage."""
    try:
        yield
    except RuntimeError as error:
        cause = error.__cause__
        if isinstance(cause, TrainingError):
            error.__cause__ = None  # it becomes the context of its cause: each would be the other's
            raise cause from None
        raise


def example_of(form: Form, requires_grad: bool) -> torch.Tensor:
    """Return a tensor of a form on the meta device, as an example of a stage's input or output."""
    return torch.empty(form.shape, dtype=form.dtype, device="meta", requires_grad=requires_grad)
