"""A stage of the model on each rank, micro-batches on their way through all of them.

    rank 0 | f1 f2 f3 f4             b1 b2 b3 b4        activations travel down,
    rank 1 |    f1 f2 f3 f4       b1 b2 b3 b4           gradients travel up,
    rank 2 |       f1 f2 f3 f4 b1 b2 b3 b4              parameters never
           +------------------------------------> time

torch.distributed.pipelining runs the schedule: which micro-batch goes forward or backward when. Above is gpipe (Huang et al.
2018, arXiv:1811.06965); 1f1b begins with the backwards as soon as it can and so keeps at most p micro-batches in memory
(Narayanan et al. 2019, PipeDream); the interleaved and zero-bubble ones give each rank several stages or cut a backward in two.
"""

from collections import OrderedDict
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.config.types import Count
from ddp_lab.data.sharding import IGNORE
from ddp_lab.models.chain import Chain
from ddp_lab.models.partition import Partition
from ddp_lab.strategies.base import Strategy, loss_sum, sums
from ddp_lab.world.runtime import Runtime

# torch's own names, in lower case. Not among them: zbvzerobubble and dualpipev, through which torch (2.11 to 2.15) cannot
# evaluate: "can't steal_bwd_input if this stage doesn't have backward".
Schedule = Literal["gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble"]


class Stage(nn.Sequential):
    """Consecutive blocks; what leaves them has the dtype that the next rank has its buffers made for."""

    def __init__(self, blocks: OrderedDict[str, nn.Module], runtime: Runtime, dtype: torch.dtype):
        super().__init__(blocks)
        self.runtime, self.dtype = runtime, dtype

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        with self.runtime.autocast():
            return super().forward(activation).to(self.dtype)


class MicroBatchLoss:
    """What the schedule calls on the last stage. Not a method of the strategy: the schedule would keep that alive."""

    def __init__(self):
        self.divisor, self.results = 1.0, []

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = loss_sum(logits, targets)
        self.results.append(sums(loss, logits, targets))
        return loss / self.divisor


class Pipeline(Strategy):
    """One pipeline over all ranks.

    Args:
        schedule: name of torch's pipeline schedule.
        num_microbatches: number of micro-batches that a batch is divided into.
        num_stages: number of stages of a pipeline; null uses one for each of its ranks, or two with the interleaved schedules
            and loopedbfs.
        cut: names of the blocks that begin the second stage, the third and so on; null cuts into stages of about equal FLOPs.

    Raises:
        ConfigError: the schedule cannot have so many stages, or the model not so many cuts (in partition).
    """

    # Every rank returns its own part; the checkpoint is put together on rank 0 (state_dict).
    save_options = {"cpu_offload": True}

    def __init__(
        self, runtime: Runtime, schedule: Schedule, num_microbatches: Count, num_stages: Count | None, cut: list[str] | None
    ):
        super().__init__(runtime)
        self.lay_out(pp=runtime.world_size)
        self.schedule_name, self.num_microbatches, self.num_stages, self.cut = schedule, num_microbatches, num_stages, cut
        # Not at the top of the file: torch's pipelining imports torch._dynamo, 1.2 s.
        from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

        self.schedule_class = get_schedule_class(schedule)
        self.one_stage = issubclass(self.schedule_class, PipelineScheduleSingle)
        self.loss = MicroBatchLoss()
        self.schedules: dict[tuple[int, bool], Any] = {}

    def partition(self, model: Chain, samples: int) -> None:
        ranks, rounds = self.axes["pp"], max(1, self.num_microbatches // self.axes["pp"])
        if ranks == 1 and not self.one_stage:
            raise ConfigError(
                f"strategy.schedule={self.schedule_name}: torch's evaluation needs the stages of one rank apart, so at least 2 "
                "ranks in a pipeline; use gpipe or 1f1b for one"
            )
        if self.schedule_name == "1f1b" and self.num_microbatches < ranks:
            raise ConfigError(
                f"strategy.num_microbatches={self.num_microbatches}: strategy.schedule=1f1b needs at least one for each of the "
                f"{ranks} ranks in a pipeline; use {ranks} or more, or gpipe"
            )
        if "interleaved" in self.schedule_name and self.num_microbatches % rounds:
            raise ConfigError(
                f"strategy.num_microbatches={self.num_microbatches}: strategy.schedule={self.schedule_name} wants as many in "
                f"each round over its {ranks} ranks; use {rounds * ranks} or {(rounds + 1) * ranks}"
            )
        if self.num_microbatches > samples:
            raise ConfigError(
                f"strategy.num_microbatches={self.num_microbatches}: a pipeline gets {samples} samples at once, its share of "
                f"batch_size divided by accumulate; use at most {samples}"
            )
        if self.num_stages is None:
            self.num_stages = ranks if self.one_stage else 2 * ranks
        if self.num_stages % ranks or (self.one_stage and self.num_stages != ranks):
            needs = f"{ranks} stages, one for each" if self.one_stage else f"a multiple of {ranks} stages"
            raise ConfigError(
                f"strategy.num_stages={self.num_stages}: strategy.schedule={self.schedule_name} on {ranks} ranks needs {needs}"
            )
        self.parts = Partition(model, self.num_stages, self.cut)

    def setup(self, model: Chain) -> None:
        mesh = self.runtime.mesh(self.axes)
        self.dp_group, self.pp_group = mesh.get_group("dp"), mesh.get_group("pp")
        ranks, rank = self.axes["pp"], dist.get_rank(self.pp_group)
        self.reports = rank == ranks - 1  # it has the last stage
        blocks = list(model.named_children())
        stages = {}
        for index in range(rank, self.num_stages, ranks):
            held = OrderedDict(blocks[i] for i in self.parts.parts[index])
            stages[index] = Stage(held, self.runtime, self._dtypes(index)[1]).to(self.device)
        self.stages = {index: self.wrap(stage) for index, stage in stages.items()}
        self.module = nn.Sequential(OrderedDict(block for stage in stages.values() for block in stage.named_children()))
        self.has_batch_norm = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())

    def wrap(self, stage: Stage) -> nn.Module:
        """Return what data parallelism makes of a stage; it may replace layers in it."""
        return stage

    def make_stage(self, *args: Any, **options: Any) -> Any:
        """Return torch's object for a stage, of PipelineStage or of a class derived from it."""
        from torch.distributed.pipelining import PipelineStage

        return PipelineStage(*args, **options)

    def bubble(self) -> float:
        # v stages a rank divide it: Narayanan et al. 2021, arXiv:2104.04473, 2.2
        p, v = self.axes["pp"], self.num_stages // self.axes["pp"]
        return (p - 1) / (v * self.num_microbatches + p - 1)

    def describe(self) -> str:
        p, m, shares = self.axes["pp"], self.num_microbatches, self.parts.shares
        v = self.num_stages // p
        where = self.parts.describe([f"pp rank {stage % p}" for stage in range(self.num_stages)])
        busiest = max(sum(shares[rank::p]) for rank in range(p))
        below = "below " if "zerobubble" in self.schedule_name else ""
        lines = [
            f"{self.name}: {where}, balance {1 / (p * busiest):.0%} (mean rank / busiest)",
            f"{self.schedule_name}, {m} micro-batches, expected bubble of equally busy ranks {below}"
            f"(p-1)/({'v' if v > 1 else ''}m+p-1) = {self.bubble():.0%} of the time, p={p}"
            + (f", v={v} stages a rank" if v > 1 else ""),
        ]
        if self.has_batch_norm and m > 1:
            lines.append(
                "BatchNorm takes its statistics over a micro-batch: losses differ from single's, by more the smaller it is"
            )
        return "\n".join(lines)

    def _dtypes(self, stage: int) -> tuple[torch.dtype, torch.dtype]:
        """Of what enters and what leaves a stage."""
        boundary = torch.bfloat16 if self.runtime.precision == "bf16" else torch.float32
        return torch.float32 if stage == 0 else boundary, torch.float32 if stage == self.num_stages - 1 else boundary

    def _schedule(self, size: int, training: bool) -> Any:
        """torch's schedule for micro-batches of `size` samples. Shapes are static, so each size has one of its own: a ragged
        last batch and the test set's need others than the rest."""
        key = size, training
        if key not in self.schedules:
            stages = []
            for index, module in self.stages.items():
                part = self.parts.parts[index]
                shapes = self.parts.shapes[part.start], self.parts.shapes[part.stop]
                inputs, outputs = (
                    torch.empty(size, *shape, dtype=dtype, device="meta", requires_grad=grad)
                    for shape, dtype, grad in zip(shapes, self._dtypes(index), (index > 0, True), strict=True)
                )
                stage = self.make_stage(
                    module, index, self.num_stages, self.device, input_args=inputs, output_args=outputs, group=self.pp_group
                )
                stages.append(stage)
            self.schedules[key] = self.schedule_class(
                stages[0] if self.one_stage else stages,
                self.num_microbatches,
                loss_fn=self.loss if training else None,
                scale_grads=False,
            )
        return self.schedules[key]

    def _feed(self, inputs: torch.Tensor, training: bool) -> tuple[Any, torch.Tensor, tuple[torch.Tensor, ...]]:
        """The schedule for this batch, which rows fill its micro-batches (some repeated where they do not divide), and what
        it is to be called with on this rank."""
        size = -(-len(inputs) // self.num_microbatches)
        rows = torch.arange(size * self.num_microbatches, device=inputs.device) % len(inputs)
        return self._schedule(size, training), rows, (inputs[rows],) if 0 in self.stages else ()

    def add_gradient(self, inputs: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
        schedule, rows, fed = self._feed(inputs, training=True)
        targets = targets[rows]
        targets[len(inputs) :] = IGNORE
        self.loss.divisor, self.loss.results = self.divisor(count), []
        schedule.step(*fed, target=targets if self.reports else None, return_outputs=False)
        return sum(self.loss.results) if self.reports else torch.zeros(3, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """The logits arrive at the last stage, which gives them to all ranks of the pipeline."""
        schedule, rows, fed = self._feed(inputs, training=False)
        logits = schedule.step(*fed)
        if not self.reports:
            logits = torch.empty(len(rows), *self.parts.shapes[-1], device=self.device)
        dist.broadcast(logits, group=self.pp_group, group_src=self.axes["pp"] - 1)
        return logits[: len(inputs)]

    def gradient_norm(self) -> torch.Tensor:
        squares = super().gradient_norm().square()
        dist.all_reduce(squares, group=self.pp_group)
        return squares.sqrt()

    def state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        own = super().state_dict(optimizer)
        if self.dp_rank != 0:
            return {"model": {}, "optimizer": {}}
        parts = [None] * self.axes["pp"] if self.runtime.rank == 0 else None
        dist.gather_object(own, parts, dst=0, group=self.pp_group)
        return merge(parts) if parts else own


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One state of the parts that the ranks hold."""
    groups = zip(*(part["optimizer"]["param_groups"] for part in parts), strict=True)
    return {
        "model": {name: tensor for part in parts for name, tensor in part["model"].items()},
        "optimizer": {
            "state": {name: state for part in parts for name, state in part["optimizer"]["state"].items()},
            "param_groups": [same[0] | {"params": [name for group in same for name in group["params"]]} for same in groups],
        },
    }
