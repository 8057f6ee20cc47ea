"""What runs batches through the stages of a pipeline, in micro-batches, by a schedule of torch.

torch's pipelining is imported where it is used, because that takes 1.2 s (it imports
torch._dynamo).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from ddp_lab.config.errors import TrainingError
from ddp_lab.config.worlds import has_one_stage
from ddp_lab.data.trees import Tree, rows, size
from ddp_lab.strategies.schedules import PipelinePlan
from ddp_lab.strategies.stage_shapes import StageShapes
from ddp_lab.tasks.base import Measure, Task, measure, width


class Prepared(NamedTuple):
    """A batch that has been padded, so that it can be divided into equal micro-batches.

    Attributes:
        schedule: torch's, for its micro-batches.
        rows: the row of the batch that each row of the padded batch repeats, [padded].
        arguments: of the schedule on this rank: the tensors of the padded inputs on the first rank,
            and nothing on the others.
        outputs: tensors of the model's outputs for a micro-batch, without data.
        form: of the outputs.
    """

    schedule: Any
    rows: torch.Tensor
    arguments: tuple[torch.Tensor, ...]
    outputs: Sequence[torch.Tensor]
    form: TreeSpec


class Executor(ABC):
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
        indices: this rank's stages, by their index in the pipeline.
        group: the ranks of the pipeline.
        task: with the training loss.
        device: of this rank.

    Attributes:
        has_loss: whether this rank has the last stage.
        shapes: the micro-batches that have occurred.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        indices: Collection[int],
        group: dist.ProcessGroup,
        task: Task,
        device: torch.device,
    ):
        self.plan = plan
        self.indices = indices
        self.group = group
        self.task = task
        self.device = device
        self.has_loss = plan.num_stages - 1 in indices
        self.shapes = StageShapes(plan.num_microbatches)
        self._targets: Tree = None  # of the batch
        self._form: TreeSpec | None = None  # of its outputs
        self._divisor: float | torch.Tensor = 1.0
        self._measure: Measure = measure
        self._left = 0  # samples without padding in the micro-batches that follow
        self._results: list[torch.Tensor] = []  # the sums of each micro-batch so far

    @abstractmethod
    def prepare(self, inputs: Tree, training: bool) -> Prepared:
        """Pad a batch, and let the stages expect its micro-batches.

        All ranks of the pipeline get the same batch.

        Raises:
            ConfigError: the model does not support it, or it is the first one of too many shapes.
        """

    def for_loss(self, outputs: Any, expected: torch.Tensor, num_valid: int) -> Any:
        """Return the outputs of a micro-batch, and what belongs to them, as the loss takes them.

        Args:
            outputs: as the last stage returns them.
            expected: the targets of the micro-batch; or their rows, where the targets are no
                tensor.
            num_valid: number of samples without padding.
        """
        return outputs, expected

    def add_gradient(
        self,
        inputs: Tree,
        targets: Tree,
        num_valid: int,
        divisor: float | torch.Tensor,
        measure: Measure,
    ) -> torch.Tensor:
        """Add the gradient of a batch to `.grad`, as `Strategy.add_gradient`.

        Only the last rank returns sums above 0.

        Args:
            inputs, targets, num_valid, divisor: as there.
            measure: `Strategy.measure`.
        """
        batch = self.prepare(inputs, training=True)
        self._targets = targets
        self._form = batch.form
        self._divisor = divisor
        self._measure = measure
        self._left = num_valid
        self._results = []
        expected = None
        # torch divides a tensor only: of other targets the micro-batches get the numbers of their
        # rows
        if self.has_loss:
            expected = targets[batch.rows] if isinstance(targets, torch.Tensor) else batch.rows
        with unwrapped():
            batch.schedule.step(*batch.arguments, target=expected, return_outputs=False)
        if self.has_loss:
            return reduce(torch.add, self._results)
        return torch.zeros(width(self.task), dtype=torch.float64, device=self.device)

    def _loss(self, outputs: Any, expected: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next micro-batch, on the last stage, and keep its sums.

        Arguments as in `for_loss`.
        """
        num_valid = min(self._left, len(expected))
        self._left -= num_valid
        outputs, expected = self.for_loss(outputs, expected, num_valid)
        if isinstance(self._targets, torch.Tensor):
            targets = expected
        else:
            targets = rows(self._targets, expected)
        loss, results = self._measure(self.task, outputs, targets, num_valid, self._divisor)
        self._results.append(results)
        return loss

    @torch.no_grad()
    def predict(self, inputs: Tree) -> Any:
        """Return the outputs, of which every tensor is [b, ...], on all ranks of the pipeline.

        The last rank computes and broadcasts them.
        """
        batch = self.prepare(inputs, training=False)
        with unwrapped():
            outputs = batch.schedule.step(*batch.arguments)
        if self.has_loss:
            tensors = [tensor.contiguous() for tensor in tree_leaves(outputs)]
        else:
            tensors = [
                torch.empty(
                    len(like) * self.plan.num_microbatches,
                    *like.shape[1:],
                    dtype=like.dtype,
                    device=self.device,
                )
                for like in batch.outputs
            ]
        for tensor in tensors:
            dist.broadcast(tensor, group=self.group, group_src=self.plan.ranks - 1)
        samples = size(inputs)
        return tree_unflatten([tensor[:samples] for tensor in tensors], batch.form)

    def make_stage(
        self,
        index: int,
        module: nn.Module,
        inputs: tuple[torch.Tensor, ...],
        outputs: tuple[torch.Tensor, ...],
    ) -> Any:
        """Return torch's stage for micro-batches of one form.

        Args:
            index: of the stage in the pipeline.
            module: computes it.
            inputs, outputs: on the meta device, as examples of what it gets and returns.
        """
        from torch.distributed.pipelining import PipelineStage

        return PipelineStage(
            module,
            index,
            self.plan.num_stages,
            self.device,
            input_args=inputs,
            output_args=outputs,
            group=self.group,
        )

    def make_schedule(self, stages: list[Any], training: bool) -> Any:
        """Return torch's schedule for this rank's stages. Its first step is collective."""
        from torch.distributed.pipelining.schedules import get_schedule_class

        make = cast("Callable[..., Any]", get_schedule_class(self.plan.schedule))
        return make(
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
