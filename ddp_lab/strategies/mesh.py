r"""Data, tensor and pipeline parallelism and sharding, combined on one mesh of ranks.

    pp 2 x dp 2 x tp 2        tp 0    tp 1
      pp 0   dp 0           rank 0  rank 1  \
             dp 1           rank 2  rank 3  / stage 0
      pp 1   dp 0           rank 4  rank 5  \
             dp 1           rank 6  rank 7  / stage 1

The ranks along an axis send each other:

    tp: activations, twice for every pair of layers and direction
    dp: gradients and, if they are sharded, parameters
    pp: activations, between consecutive stages

The ranks along tp are neighbours, because they send most; those along pp are farthest apart. Ranks
with the same dp read the same samples. Along dp, groups of `shard` ranks share one copy of their
stage as under fsdp: shard=1 is data parallelism as under ddp, shard=dp is fsdp, and any other
divisor of dp is hybrid sharding (HSDP).

What is done with the model depends on its kind (mesh_model.py):

    mesh_of_blocks.py   a Chain: all axes
    mesh_of_module.py   any module without stages: tp by a plan, and dp
    mesh_of_traces.py   any module with stages: pp, and dp without shards
"""

import math
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ddp_lab.config.types import BlockName, Count, ModulePattern
from ddp_lab.config.worlds import require_division, require_shards
from ddp_lab.data.trees import Tree
from ddp_lab.models.chain import Chain
from ddp_lab.models.real_view import real_view
from ddp_lab.strategies.base import gradients_of
from ddp_lab.strategies.batch_norm import BatchNorm
from ddp_lab.strategies.dtensor import local
from ddp_lab.strategies.executor import Executor
from ddp_lab.strategies.fully_shard import FullyShard, forget_order
from ddp_lab.strategies.gradients import norm_over_stages
from ddp_lab.strategies.mesh_model import MeshModel
from ddp_lab.strategies.mesh_of_blocks import MeshOfBlocks
from ddp_lab.strategies.mesh_of_module import MeshOfModule, require_no_stages
from ddp_lab.world.runtime import Runtime


class MeshKeys(TypedDict):
    """The options of a mesh, as in the config; `Mesh` describes them."""

    shard: Count | None
    tp: Count
    pp: Count
    sequence_parallel: bool
    # interleavedzerobubble is excluded: it computes the weights' gradients separately, without
    # running fully_shard's hooks.
    schedule: Literal["gpipe", "1f1b", "interleaved1f1b"]
    num_microbatches: Count
    cut: list[BlockName] | None
    plan: dict[ModulePattern, str] | None


class Mesh(FullyShard):
    """A mesh of pp x dp x tp ranks, of which dp has those that pp and tp leave.

    With pp above 1 it is a pipeline.

    Args:
        shard: ranks along dp that share one copy of the parameters, each storing a shard of every
            tensor; null: all of dp.
        tp: ranks that share each layer. The model's blocks must have a plan for it, or the model.
        pp: ranks that share the model's blocks, each with one stage or several. A module that is no
            Chain is cut by a trace, with tp=1 and shard=1.
        sequence_parallel: whether the ranks along tp also share the tokens between the layers.
        schedule: name of torch's pipeline schedule.
        num_microbatches: number of micro-batches that a batch is divided into.
        cut: names of the first blocks of the second stage, the third and so on, or paths of modules
            of a model that is no Chain; null cuts by FLOPs into one stage per rank, or two per rank
            with the interleaved schedule.
        plan: how the layers of any module are divided over tp, as under strategy=tp; its parts are
            sharded as under fsdp. It needs no blocks with a plan, and no pipeline. null: the
            model's blocks have the plan, or a model of transformers.

    Attributes, besides those of the base class:
        keys: the options, as in the config.
        kind: what is done with this kind of model. Known in `partition`.
        executor: runs batches through the stages; None: there is only one. Known after `setup`.

    Raises:
        ConfigError: the axes do not fit the number of ranks; or, in `partition`, the model does not
            fit the axes.
    """

    kind: MeshModel

    def __init__(
        self,
        runtime: Runtime,
        batch_norm: BatchNorm,
        **keys: Unpack[MeshKeys],
    ):
        super().__init__(runtime, batch_norm)
        tp = keys["tp"]
        pp = keys["pp"]
        require_division(runtime.world_size, {"pp": pp, "tp": tp})
        dp = runtime.world_size // (pp * tp)
        self.dp_size = dp
        self.replicas = dp
        shard = keys["shard"] or dp
        require_shards(shard, dp)

        # the last one varies fastest with the rank
        self.axes = {"pp": pp, "replicate": dp // shard, "shard": shard, "tp": tp}
        self.dp_rank = runtime.rank // tp % dp
        self.pp_rank = runtime.rank // (tp * dp)
        self.sharded = shard > 1
        self.keys = keys
        self.computes_head_losses = pp == 1 and tp == 1
        self.executor: Executor | None = None
        if pp > 1:
            self.num_microbatches = keys["num_microbatches"]
            self.cuts_model = True
        if keys.get("plan") is None:
            self.divides_blocks = True
        else:
            require_no_stages(keys)

    def partition(self, model: nn.Module, samples: int) -> None:
        self.kind = self._kind_of(model)
        super().partition(model, samples)
        self.kind.partition(self, model, samples)
        self.unsupported |= self.kind.unsupported
        self.tries_plan = self.kind.tries_plan
        self.bubble = self.kind.bubble

    def _kind_of(self, model: nn.Module) -> MeshModel:
        """Return what is done with this kind of model, and set what follows from it.

        Raises:
            ConfigError: the axes do not fit it.
        """
        if self.divides_blocks and isinstance(model, Chain):
            self.calls_blocks = True
            if self.dp_size == 1:
                self._compute_with_parameters()
            return MeshOfBlocks()
        if self.axes["pp"] == 1:
            plan = self.keys.get("plan")
            return MeshOfModule(None if plan is None else dict(plan))
        from ddp_lab.strategies.mesh_of_traces import MeshOfTraces, require_only_stages

        require_only_stages(self.keys, self.axes, model)
        self.replaces_parameters = False
        self._compute_with_parameters()
        return MeshOfTraces()

    def _compute_with_parameters(self) -> None:
        """Let a forward pass have the parameters, not copies that `fully_shard` gathers."""
        self.copies_weights = False
        self.autocast = self.runtime.autocast

    def setup(self, model: nn.Module) -> None:
        self._make_groups()
        placed = self.kind.setup(self, model)
        self.module = placed.module
        self.is_metric_rank = placed.is_metric_rank
        self.executor = placed.executor
        if placed.forward is not None:
            self.forward = placed.forward

    def _make_groups(self) -> None:
        self.mesh = self.runtime.mesh(self.axes)
        self.pp_group = self.mesh.get_group("pp")
        if min(self.axes["replicate"], self.axes["shard"]) > 1:
            axes = {"pp": self.axes["pp"], "dp": self.dp_size, "tp": self.axes["tp"]}
            self.dp_group = self.runtime.mesh(axes).get_group("dp")
        else:
            self.dp_group = self.mesh.get_group("shard" if self.sharded else "replicate")

    def along_dp(self) -> DeviceMesh:
        """Return the ranks along dp: of two dimensions if there are several copies of shards."""
        return self.mesh["replicate", "shard"] if self.axes["replicate"] > 1 else self.mesh["shard"]

    def shard_unit(self, unit: nn.Module, shard: Callable[[nn.Module], object]) -> None:
        self.kind.before_sharding(unit)
        super().shard_unit(unit, shard)
        self.kind.after_sharding(unit)

    def peers(self) -> list[int]:
        """Return the ranks with this rank's blocks, itself included, each with its own batches."""
        tp = self.axes["tp"]
        first = self.runtime.rank - self.dp_rank * tp
        return [first + tp * replica for replica in range(self.dp_size)]

    def describe(self) -> str:
        return self.kind.describe(self)

    def add_gradient(
        self, inputs: Tree, targets: Tree, num_valid: int, divisor: float | torch.Tensor
    ) -> torch.Tensor:
        self.require_inputs(inputs)
        self.kind.begin_step(inputs, num_valid > 0)
        if self.executor is None:
            return super().add_gradient(inputs, targets, num_valid, divisor)
        return self.executor.add_gradient(inputs, targets, num_valid, divisor, self.measure)

    def predict(self, inputs: Tree) -> Any:
        self.require_inputs(inputs)
        self.kind.begin_prediction(inputs)
        if self.executor is None:
            return super().predict(inputs)
        logits = self.executor.predict(inputs)
        forget_order(self.module)
        return logits

    @contextmanager
    def no_sync(self) -> Generator[None]:
        # torch's schedules sum the gradients after the last micro-batch of every
        # gradient-accumulation step.
        sums_itself = self.executor is not None or not self.copies_weights
        with self.kind.no_sync(), nullcontext() if sums_itself else super().no_sync():
            yield

    def reduce_gradients(self) -> None:
        self.kind.reduce_gradients(self)

    def require_called_hooks(self, model: nn.Module) -> None:
        self.kind.require_called_hooks(self, model)
        super().require_called_hooks(model)

    def counted_parameters(self) -> Iterable[nn.Parameter]:
        return self.kind.counted_parameters(self)

    def gradient_norm(self) -> torch.Tensor:
        if not self.kind.has_shards:
            return norm_over_stages(super().gradient_norm(), self.pp_group)
        # Every rank adds its shards, divided by the number of ranks of its stage that have the same
        # ones.
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        dtype = torch.get_default_dtype()
        for gradient in gradients_of(self.counted_parameters()):
            copies = self.dp_size * self.axes["tp"] / shards_of(gradient)
            own_part = real_view(local(gradient))
            dtype = torch.promote_types(dtype, own_part.dtype)
            squares += own_part.double().square().sum() / copies
        return self.runtime.all_reduce(squares).sqrt().to(dtype)


def shards_of(gradient: torch.Tensor) -> int:
    """Return the number of different shards of a gradient that ranks have; 1 if it is complete."""
    if not isinstance(gradient, DTensor):
        return 1
    places = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for place, size in places if not place.is_replicate())
