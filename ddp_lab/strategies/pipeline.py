"""Pipeline parallelism: each rank holds one stage of the model, and micro-batches pass through all stages.

    rank 0 | f1 f2 f3 f4             b1 b2 b3 b4        activations are sent down,
    rank 1 |    f1 f2 f3 f4       b1 b2 b3 b4           their gradients up,
    rank 2 |       f1 f2 f3 f4 b1 b2 b3 b4              parameters are never sent
           +------------------------------------> time

torch.distributed.pipelining runs the schedule, which decides when each micro-batch goes forward and backward; the picture is
that of gpipe, and schedules.py describes them all.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.config.errors import ConfigError, listed
from ddp_lab.config.types import BlockName, Count
from ddp_lab.data.batch import IGNORE
from ddp_lab.models.chain import Chain
from ddp_lab.models.partition import Partition, changes_input
from ddp_lab.strategies.activation_checkpointing import Checkpointing
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.batch_norm import is_batch_norm
from ddp_lab.strategies.block_times import Balance, cut_by_time
from ddp_lab.strategies.saved_state import gather_states, merge
from ddp_lab.strategies.schedules import Schedule, count_stages, describe, expected_bubble, time_slots
from ddp_lab.strategies.shardable import require_whole
from ddp_lab.strategies.stage import MicroBatchLoss, Stage
from ddp_lab.strategies.sums import add_up
from ddp_lab.strategies.torch_schedules import TorchSchedule, TorchSchedules, boundaries_of, make_stage
from ddp_lab.world.runtime import Runtime


class Pipeline(Strategy):
    """One pipeline over all ranks.

    Args:
        schedule: name of torch's pipeline schedule.
        num_microbatches: number of micro-batches that a batch is divided into.
        num_stages: number of stages of a pipeline; null uses one per rank, or two per rank with the interleaved schedules
            and loopedbfs.
        cut: names of the first blocks of the second stage, the third and so on; null cuts by `balance`.
        balance: what the stages have about equally much of: FLOPs, or time, which rank 0 measures for each block at the start;
            block_times.json in the run directory keeps the times.

    Raises:
        ConfigError: in `partition`, the schedule does not support this number of ranks, stages or micro-batches, or the model
            cannot be cut into the stages.
    """

    needs_chain = compiled_by_block = True
    performance_options = frozenset({"compile"})
    save_options = {"cpu_offload": True}  # each rank returns the state of its stages; rank 0 merges them (state_dict)

    def __init__(
        self,
        runtime: Runtime,
        schedule: Schedule,
        num_microbatches: Count,
        num_stages: Count | None,
        cut: list[BlockName] | None,
        balance: Balance = "flops",
    ):
        super().__init__(runtime)
        self.lay_out(pp=runtime.world_size)
        self.schedule_name: Schedule = schedule
        self.num_microbatches = num_microbatches
        self.cut = None if cut is None else [str(name) for name in cut]
        self.balance = balance
        self.requested_stages = num_stages
        if "zerobubble" in schedule:
            self.refusals["compile"] = (
                f"strategy.schedule={schedule} cuts the backward pass in two, and that of a compiled block is one"
            )
        self.stage_autocast: Callable[[], AbstractContextManager[object]] = runtime.autocast
        self.checkpointing: Checkpointing = "none"
        self.make_stage: Callable[..., Any] = make_stage

    def partition(self, model: nn.Module, samples: int) -> None:
        assert isinstance(model, Chain)  # `needs_chain`
        self.num_stages = count_stages(
            self.schedule_name, self.axes["pp"], self.num_microbatches, self.requested_stages, samples
        )
        if self.cut and self.balance == "time":
            raise ConfigError(
                f"strategy.balance=time: has no effect with strategy.cut={listed(self.cut)}, which names the stages; remove one"
            )
        self.parts = Partition(model, self.num_stages, self.cut)
        if self.balance == "flops":
            self._require_separable(model)
        self.timed_samples = max(1, samples // self.num_microbatches)
        self.shapes: list[torch.Size] = self.parts.shapes

    def _require_separable(self, model: Chain) -> None:
        """Check that no two stages share a parameter, and that none changes what it receives in place.

        torch's pipelines receive into leaves of autograd.
        """
        stage_of = {self.parts.names[i]: stage for stage, part in enumerate(self.parts.parts) for i in part}
        require_whole(model, stage_of, self.name)
        blocks = list(model.children())
        for number, part in enumerate(self.parts.parts[1:], start=2):
            if changes_input([blocks[i] for i in part], self.parts.shapes[part.start]):
                first = self.parts.names[part.start]
                raise ConfigError(
                    f"stage {number} of the pipeline, which begins with block {first}, changes its input in place; torch's "
                    "pipelines do not allow that. Use inplace=False in the first layers of this stage, or other first "
                    "blocks of the stages by strategy.cut"
                )

    def setup(self, model: nn.Module) -> None:
        assert isinstance(model, Chain)  # `needs_chain`
        if self.balance == "time" and self.axes["pp"] > 1:
            cut_by_time(self.parts, model, self.timed_samples, self.runtime, self.device, self.times_file)
            self._require_separable(model)
        self.micro_batch_loss = MicroBatchLoss(self.loss)
        self.connect()
        ranks, rank = self.axes["pp"], dist.get_rank(self.pp_group)
        self.reports = self.has_loss = rank == ranks - 1  # the last rank has the last stage, and so the loss
        self.has_batch_norm = any(map(is_batch_norm, model.modules()))
        blocks = list(model.named_children())
        shapes = [*(self.shapes[part.start] for part in self.parts.parts), self.shapes[-1]]
        boundaries = boundaries_of(shapes, self.runtime.precision)
        stages: dict[int, Stage] = {}
        for index in range(rank, self.num_stages, ranks):
            own_blocks = OrderedDict(blocks[i] for i in self.parts.parts[index])
            stages[index] = Stage(own_blocks, self.stage_autocast, boundaries[index + 1].dtype, self.checkpointing)
        self.stages = {index: self.place(stage) for index, stage in stages.items()}
        self.module = nn.Sequential(OrderedDict(block for stage in stages.values() for block in stage.named_children()))
        make = partial(self.make_stage, device=self.device, group=self.pp_group)
        self.schedules = TorchSchedules(
            self.schedule_name, self.stages, boundaries, self.num_microbatches, self.micro_batch_loss, make
        )

    def connect(self) -> None:
        """Make the process groups of the mesh. Collective; called by `setup`."""
        mesh = self.runtime.mesh(self.axes)
        self.dp_group, self.pp_group = mesh.get_group("dp"), mesh.get_group("pp")

    def place(self, stage: Stage) -> nn.Module:
        """Move a stage to the device, and return the module that the pipeline calls for it, which may be a wrapper.

        The method may replace layers of `stage`.
        """
        return self.to_device(stage)

    def bubble(self) -> float | None:
        return expected_bubble(self.axes["pp"], self.num_stages, self.num_microbatches)

    def time_slots(self) -> dict[int, list[tuple[int, int, str, int]]]:
        schedule: Any = next((made for (_, training), made in self.schedules.made.items() if training), None)
        if schedule is None:  # a mesh without pp
            return {}
        order = schedule.pipeline_order if hasattr(schedule, "pipeline_order") else schedule._get_pipeline_order()
        return time_slots({rank: [str(action) for action in actions] for rank, actions in order.items()})

    def describe(self) -> str:
        p = self.axes["pp"]
        where = self.parts.describe([f"pp rank {stage % p}" for stage in range(self.num_stages)])
        return f"{self.name}: {where}, {self.describe_schedule()}"

    def describe_schedule(self) -> str:
        """Return lines about the balance of the stages, the schedule and BatchNorm, for the log."""
        lines = describe(self.schedule_name, self.axes["pp"], self.num_stages, self.num_microbatches, self.parts.shares)
        if self.has_batch_norm and self.num_microbatches > 1:
            lines.append(
                "BatchNorm normalises each micro-batch separately: losses differ from single's, most with small micro-batches"
            )
        return "\n".join(lines)

    def _prepare(self, inputs: torch.Tensor, training: bool) -> tuple[TorchSchedule, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Pad a batch, [b, channels, height, width], so that it can be divided into equal micro-batches.

        Returns:
            The schedule for it; the row of the batch that each row of the padded batch repeats, [padded]; and the arguments
            of the schedule on this rank, which are the padded inputs on the first rank and nothing on the others.
        """
        size = -(-len(inputs) // self.num_microbatches)
        rows = torch.arange(size * self.num_microbatches, device=inputs.device) % len(inputs)
        return self.schedules.get(size, training), rows, (inputs[rows],) if 0 in self.stages else ()

    def add_gradient(self, inputs: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
        schedule, rows, arguments = self._prepare(inputs, training=True)
        targets = targets[rows]
        targets[len(inputs) :] = IGNORE if targets.dim() == 1 else 0  # mixed targets are probabilities
        measured = self.micro_batch_loss
        measured.divisor, measured.results = self.divisor(count), []
        schedule.step(*arguments, target=targets if self.has_loss else None, return_outputs=False)
        return add_up(measured.results) if self.has_loss else torch.zeros(3, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits, [b, classes], on all ranks of the pipeline: the last rank computes and broadcasts them."""
        schedule, rows, arguments = self._prepare(inputs, training=False)
        logits = schedule.step(*arguments)
        if logits is None:  # on all ranks but the last
            logits = torch.empty(len(rows), *self.shapes[-1], device=self.device)
        dist.broadcast(logits, group=self.pp_group, group_src=self.axes["pp"] - 1)
        return logits[: len(inputs)]

    def gradient_norm(self) -> torch.Tensor:
        squares = super().gradient_norm().square()
        dist.all_reduce(squares, group=self.pp_group)
        return squares.sqrt()

    def state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return merge(self.gather(super().state_dict(optimizer)))

    def model_state(self) -> dict[str, torch.Tensor]:
        return {name: tensor for state in self.gather(super().model_state()) for name, tensor in state.items()}

    def gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the states of the stages of all ranks of the first pipeline on rank 0; as `gather_states`."""
        return gather_states(own, self.pp_group)
