r"""Data, tensor and pipeline parallelism and sharding, combined on a mesh of ranks in one code path.

    pp 2 x dp 2 x tp 2        tp 0    tp 1                what the ranks along an axis send to each other
      pp 0   dp 0           rank 0  rank 1  \             tp: activations, twice for every pair of layers and direction
             dp 1           rank 2  rank 3  / stage 0     dp: gradients and, if they are sharded, parameters
      pp 1   dp 0           rank 4  rank 5  \             pp: activations, between consecutive stages
             dp 1           rank 6  rank 7  / stage 1

The ranks along tp are neighbours, because they send most; those along pp are farthest apart. Ranks with the same dp read the
same samples. Along dp, groups of `shard` ranks share one copy of their stage as under fsdp: shard=1 is data parallelism as
under ddp, shard=dp is fsdp, and any other divisor of dp is hybrid sharding (HSDP).

Each block is divided over tp (tensor_parallel.py), and then `fully_shard` is applied to it, also along an axis of one rank.
Every parameter is therefore a DTensor of the same mesh, which optimizers, clipping, averages and checkpoints treat alike.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_lab.config.errors import ConfigError
from ddp_lab.config.types import BlockName, Count
from ddp_lab.models.chain import Chain
from ddp_lab.models.partition import Partition
from ddp_lab.strategies.activation_checkpointing import Checkpointing, require_no_batch_norm
from ddp_lab.strategies.all_reduce import gradients_of
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm
from ddp_lab.strategies.block_times import Balance
from ddp_lab.strategies.fill import PresentWeights, fill
from ddp_lab.strategies.fully_shard import forget_order, refused, shard, sharded_in, without_sync
from ddp_lab.strategies.mesh_layout import arrange, other_sizes, picture
from ddp_lab.strategies.offload import HOST, offload_policy, require_no_buffers, wait_for_copies
from ddp_lab.strategies.pipeline import Pipeline
from ddp_lab.strategies.shardable import require_dimensions, require_own_parameters
from ddp_lab.strategies.shards import local
from ddp_lab.strategies.stage import Stage
from ddp_lab.strategies.tensor_parallel import OWN, parallelize, token_layouts
from ddp_lab.strategies.tensor_parallel_plan import check_plans
from ddp_lab.strategies.whole import complete
from ddp_lab.world.runtime import Runtime

# interleavedzerobubble is excluded for the same reason as in ddp_pipeline.py.
Schedule = Literal["gpipe", "1f1b", "interleaved1f1b", "loopedbfs"]


class Mesh(Pipeline):
    """A mesh of pp x dp x tp ranks. The options of Pipeline are used if pp is above 1.

    Args:
        dp: number of local batches that a global batch consists of; null: number of ranks / (pp x tp).
        shard: ranks along dp that share one copy of the parameters, each storing a shard of every tensor; null: all of dp.
        tp: ranks that share each layer. The model's blocks must have a plan for it.
        pp: ranks that share the model's blocks, each with one stage or several.
        sequence_parallel: whether the ranks along tp also share the tokens between the layers.
        batch_norm: ranks over which BatchNorm computes its statistics in training: each rank separately (local), or all
            ranks that read different local batches together (sync).
        checkpoint_activations: what the backward pass computes again instead of keeping it: nothing (none), each block's
            forward pass (block), or a block's forward pass but for matrix multiplications and attention (selective).
        offload: whether parameters, gradients and the optimizer's state are in host memory, and the optimizer's step is on the
            CPU, which takes less memory of the GPU and more time.

    Raises:
        ConfigError: the axes do not fit the number of ranks; or, in `partition`, the model does not fit the axes.
    """

    performance_options = frozenset({"cuda_graph", "compile", "fused"})
    has_dtensors = True
    save_options = {}  # each rank returns its shards; `gather` makes full tensors of them

    def __init__(
        self,
        runtime: Runtime,
        dp: Count | None,
        shard: Count | None,
        tp: Count,
        pp: Count,
        sequence_parallel: bool,
        schedule: Schedule,
        num_microbatches: Count,
        num_stages: Count | None,
        cut: list[BlockName] | None,
        batch_norm: BatchNorm,
        checkpoint_activations: Checkpointing = "none",
        offload: bool = False,
        balance: Balance = "flops",
    ):
        super().__init__(runtime, schedule, num_microbatches, num_stages, cut, balance)
        self.axes = arrange(runtime.world_size, dp, shard, tp, pp)
        self.other_sizes = other_sizes(runtime.world_size, dp, shard, pp)
        self.dp_size = self.replicas = self.axes["replicate"] * self.axes["shard"]
        self.dp_rank = runtime.rank // tp % self.dp_size
        self.sharded = self.axes["shard"] > 1
        self.sequence_parallel, self.batch_norm = sequence_parallel, batch_norm
        self.checkpointing = checkpoint_activations
        self.offload = offload
        self.refusals = self.refusals | refused(self.checkpointing, offload)
        if pp > 1:
            self.refusals["cuda_graph"] = f"the stages of a pipeline (strategy.pp={pp}) were never captured"
        self.stage_autocast = nullcontext  # fully_shard has its own mixed-precision policy
        self.steps = Pipeline if pp > 1 else Strategy  # whose methods compute a step

    def partition(self, model: nn.Module, samples: int) -> None:
        assert isinstance(model, Chain)  # `needs_chain`
        require_dimensions(model, self.name)
        require_own_parameters(model)
        require_no_batch_norm(model.modules(), self.checkpointing)
        require_no_buffers(model, self.offload)
        tp = self.axes["tp"]
        if self.axes["pp"] > 1:
            super().partition(model, samples)
        elif self.requested_stages not in (None, 1) or self.cut or self.balance == "time":
            raise ConfigError(
                "strategy.num_stages, strategy.cut and strategy.balance=time: are only used if strategy.pp is above 1, got "
                "strategy.pp=1"
            )
        else:
            self.num_stages, self.parts = 1, Partition(model, 1)
            self.shapes = self.parts.shapes
        if tp > 1 or self.sequence_parallel:
            check_plans(model, self.shapes, tp, self.sequence_parallel, self.other_sizes)
        self.tokens = token_layouts(model, self.sequence_parallel)
        self.shapes = [
            torch.Size([shape[0] // tp, *shape[1:]]) if tokens == OWN else shape
            for shape, tokens in zip(self.shapes, self.tokens, strict=True)
        ]

    def connect(self) -> None:
        self.policy = offload_policy(self.offload, self.device)
        self.mesh = self.runtime.mesh(self.axes)
        self.pp_group = self.mesh.get_group("pp")
        if min(self.axes["replicate"], self.axes["shard"]) > 1:
            axes = {"pp": self.axes["pp"], "dp": self.dp_size, "tp": self.axes["tp"]}
            self.dp_group = self.runtime.mesh(axes).get_group("dp")
        else:
            self.dp_group = self.mesh.get_group("shard" if self.sharded else "replicate")

    def setup(self, model: nn.Module) -> None:
        sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in model.children()]
        super().setup(model)
        self.reports = self.has_loss and self.mesh["tp"].get_local_rank() == 0
        self.forward = next(iter(self.stages.values()))  # the only stage, if no schedule calls the stages
        held = torch.zeros(self.num_devices, dtype=torch.int64, device=self.device)
        held[self.runtime.rank] = sum(local(parameter).nbytes for parameter in self.module.parameters())
        self.picture = picture(self.axes, self.parts, sizes, self.runtime.all_reduce(held).tolist())

    def place(self, stage: Stage) -> nn.Module:
        """Divide a stage over the ranks of its pp. Every rank has the complete stage only on the CPU."""
        tokens = dict(zip(self.parts.names, zip(self.tokens, self.tokens[1:], strict=False), strict=True))
        weights = self.initial_weights or PresentWeights(stage)
        set_batch_norm(stage.to("meta"), self.batch_norm, self.dp_group)
        if self.axes["tp"] > 1:
            for name, block in stage.named_children():
                parallelize(block, self.mesh["tp"], *tokens[name])
        along_dp = self.mesh["replicate", "shard"] if self.axes["replicate"] > 1 else self.mesh["shard"]
        shard([*stage.children(), stage], along_dp, self.axes["pp"] == 1, self.runtime.precision, self.policy)
        for part in sharded_in(stage):
            part.set_gradient_divide_factor(1.0)  # the gradients of the ranks are summed (`divisor`)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction with a factor
        fill(stage, weights, HOST if self.offload else self.device)
        return stage

    def describe(self) -> str:
        lines = f"mesh on {self.where}:\n{self.picture}"
        return lines if self.steps is Strategy else f"{lines}\n{self.describe_schedule()}"

    def bubble(self) -> float | None:
        return self.steps.bubble(self)

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()

    def add_gradient(self, inputs: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
        return self.steps.add_gradient(self, inputs, targets, count)

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        logits = self.steps.predict(self, inputs)
        forget_order(self.module)
        return logits

    def no_sync(self) -> AbstractContextManager[None]:
        # torch's schedules sum the gradients after the last micro-batch of every gradient-accumulation step.
        return nullcontext() if self.steps is Pipeline else without_sync(self.forward)

    def forget_gathered(self) -> None:
        for part in sharded_in(self.module):
            part.reshard()
        wait_for_copies(self.offload, self.device)

    def gradient_norm(self) -> torch.Tensor:
        # Every rank adds its shards, divided by the number of ranks of its stage that have the same ones.
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for gradient in cast("list[DTensor]", gradients_of(self.parameters())):
            places = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
            shards = math.prod(size for place, size in places if not place.is_replicate())
            copies = self.dp_size * self.axes["tp"] / shards
            squares += local(gradient).double().square().sum() / copies
        return self.runtime.all_reduce(squares).sqrt().to(torch.get_default_dtype())

    def gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        return super().gather(complete(own))
