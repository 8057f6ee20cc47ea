"""The schedules of torch.distributed.pipelining that run one rank's stages, one for each size of a micro-batch.

torch's pipelining is imported where it is used, because that takes 1.2 s (it imports torch._dynamo).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from torch import nn

from ddp_lab.strategies.schedules import Schedule, has_one_stage
from ddp_lab.strategies.stage import MicroBatchLoss

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

TorchSchedule: TypeAlias = "PipelineScheduleSingle | PipelineScheduleMulti"


class Boundary(NamedTuple):
    """The activations between two stages, or before the first or after the last one.

    Attributes:
        shape: shape of one sample's activation.
        dtype: its dtype.
    """

    shape: torch.Size
    dtype: torch.dtype

    def example(self, size: int, requires_grad: bool) -> torch.Tensor:
        """Return the activation of a micro-batch of `size` samples on the meta device."""
        return torch.empty(size, *self.shape, dtype=self.dtype, device="meta", requires_grad=requires_grad)


def boundaries_of(shapes: list[torch.Size], precision: str) -> list[Boundary]:
    """Return the boundaries of all stages: what each gets, and what the last one returns.

    Args:
        shapes: shape of one sample's activation at each boundary.
        precision: float32, in which all activations are sent; or bf16, in which all but the images and the logits are.
    """
    outside = torch.get_default_dtype()
    between = torch.bfloat16 if precision == "bf16" else outside
    last = len(shapes) - 1
    return [Boundary(shape, outside if place in (0, last) else between) for place, shape in enumerate(shapes)]


def make_stage(*args: Any, **options: Any) -> Any:
    """Return torch's PipelineStage. The arguments are those of PipelineStage."""
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage(*args, **options)


class TorchSchedules:
    """The schedules of one rank, which are made when they are first used and then kept.

    A schedule has static shapes. There is therefore one for each size, of which a partial last batch has its own. Training and
    evaluation have separate schedules, because only training computes a loss.

    Args:
        name: name of the schedule.
        stages: this rank's stages by their index in the pipeline.
        boundaries: of all stages: what each gets, and what the last one returns.
        num_microbatches: number of micro-batches that a batch is divided into.
        loss: the loss of a micro-batch, in training.
        make_stage: makes torch's stage of a module, its index, the number of stages, `input_args` and `output_args`. It must
            not refer to the strategy, which torch would keep alive.

    Attributes:
        made: the schedules by size of a micro-batch, and by whether they are for training.
    """

    def __init__(
        self,
        name: Schedule,
        stages: dict[int, nn.Module],
        boundaries: list[Boundary],
        num_microbatches: int,
        loss: MicroBatchLoss,
        make_stage: Callable[..., Any],
    ):
        self.name: Schedule = name
        self.stages, self.boundaries, self.num_microbatches = stages, boundaries, num_microbatches
        self.loss, self.make_stage = loss, make_stage
        self.made: dict[tuple[int, bool], TorchSchedule] = {}

    def get(self, size: int, training: bool) -> TorchSchedule:
        """Return the schedule for micro-batches of `size` samples."""
        key = size, training
        if key not in self.made:
            self.made[key] = self._make(size, training)
        return self.made[key]

    def _make(self, size: int, training: bool) -> TorchSchedule:
        from torch.distributed.pipelining.schedules import get_schedule_class

        stages = [
            self.make_stage(
                module,
                index,
                len(self.boundaries) - 1,
                input_args=self.boundaries[index].example(size, requires_grad=index > 0),
                output_args=self.boundaries[index + 1].example(size, requires_grad=True),
            )
            for index, module in self.stages.items()
        ]
        make_schedule = cast("Callable[..., TorchSchedule]", get_schedule_class(self.name))
        return make_schedule(
            stages[0] if has_one_stage(self.name) else stages,
            self.num_microbatches,
            loss_fn=self.loss if training else None,
            scale_grads=False,
        )
