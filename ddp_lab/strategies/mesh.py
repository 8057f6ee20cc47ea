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

Each block is divided over tp (tensor_parallel.py), and then `fully_shard` is applied to it, also
along an axis of one rank. Every parameter is therefore a DTensor of the same mesh, which
optimizers, clipping, averages and checkpoints treat alike.

That is for a Chain of blocks. Any other module has either no stages (mesh_of_module.py), or stages
that are traces (traced_model.py), which are neither divided over tp nor sharded.
"""

import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ddp_lab.config.errors import ConfigError
from ddp_lab.config.types import BlockName, Count, ModulePattern
from ddp_lab.config.worlds import require_division, require_shards
from ddp_lab.data.trees import Tree
from ddp_lab.models.boundaries import Form
from ddp_lab.models.chain import Chain, tie, tied_parameters
from ddp_lab.models.partition import Partition
from ddp_lab.models.real_view import real_view
from ddp_lab.strategies.activation_sums import make_group
from ddp_lab.strategies.all_reduce import flat
from ddp_lab.strategies.base import gradients_of
from ddp_lab.strategies.batch_norm import BatchNorm, is_batch_norm, set_batch_norm
from ddp_lab.strategies.block_gradients import BlockGradients, need_gradient
from ddp_lab.strategies.dtensor import local
from ddp_lab.strategies.executor import Executor
from ddp_lab.strategies.fully_shard import FullyShard, forget_order
from ddp_lab.strategies.gradients import sum_gradients
from ddp_lab.strategies.mesh_of_module import UNTESTED, MeshOfModule, require_no_stages
from ddp_lab.strategies.parameters import fill
from ddp_lab.strategies.peer_sums import PeerSums
from ddp_lab.strategies.schedules import PipelinePlan
from ddp_lab.strategies.stage_forms import StageForms
from ddp_lab.strategies.stage_weights import StageWeights
from ddp_lab.strategies.stages import PipelineExecutor, Stage, blocks_of, make_stages
from ddp_lab.strategies.tensor_parallel import (
    check_plans,
    is_of_user,
    own_tokens,
    parallelize,
    token_layouts,
)
from ddp_lab.strategies.unit_gradients import eager
from ddp_lab.strategies.unit_order import UnitOrder
from ddp_lab.strategies.units import is_self_contained
from ddp_lab.strategies.unused import every_gradient
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:
    from ddp_lab.strategies.traced_model import TracedModel


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

    Raises:
        ConfigError: the axes do not fit the number of ranks; or, in `partition`, the model does not
            fit the axes.
    """

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
        self.of_module: MeshOfModule | None = None  # a complete one
        self.traced: TracedModel | None = None  # of a module that is cut by a trace
        self.executor: Executor | None = None
        self.peer_sums: PeerSums | None = None
        self.gradients: list[BlockGradients] = []  # of each stage of this rank
        if pp > 1:
            self.num_microbatches = keys["num_microbatches"]
            self.cuts_model = True
        if keys.get("plan") is None:
            self.divides_blocks = True
        else:
            require_no_stages(keys)

    def partition(self, model: nn.Module, samples: int) -> None:
        is_complete = self.axes["pp"] == 1
        if self.divides_blocks and isinstance(model, Chain):
            self.calls_blocks = True
        elif is_complete:
            plan = self.keys.get("plan")
            self.of_module = MeshOfModule(None if plan is None else dict(plan))
        else:
            require_only_stages(self.keys, self.axes, model)
            self.copies_weights = False
            self.replaces_parameters = False
            self.autocast = self.runtime.autocast
        super().partition(model, samples)
        if self.of_module is not None:
            self.of_module.partition(self, model)
            self.unsupported |= dict.fromkeys(("compile", "cuda_graph"), UNTESTED)
            self.tries_plan = self.of_module.plan is not None
        elif isinstance(model, Chain):
            self._cut(model, samples)
        else:
            from ddp_lab.strategies.traced_model import UNSUPPORTED_BY_TRACES, cut_by_trace

            self.traced = cut_by_trace(self, model, samples)
            self.unsupported |= UNSUPPORTED_BY_TRACES
            self.plan = self.traced.plan
            self.weights = self.traced.weights
            self.bubble = self.plan.bubble

    def _cut(self, model: Chain, samples: int) -> None:
        """Decide which rank has which blocks of a Chain, as `partition`."""
        tp = self.axes["tp"]
        pp = self.axes["pp"]
        tokens_too = self.keys["sequence_parallel"]

        if pp > 1:
            self.plan = PipelinePlan.make(self.keys, model, pp, samples)
            self.bubble = self.plan.bubble
        elif self.keys["cut"]:
            raise ConfigError(
                "strategy.cut: is only used if strategy.pp is above 1, got strategy.pp=1"
            )
        else:
            self.plan = PipelinePlan(
                "gpipe", 1, 1, Partition(model, 1), any(map(is_batch_norm, model.modules()))
            )
        assert isinstance(self.plan.parts, Partition)  # of a Chain
        self.weights = StageWeights.of_chain(model, self.plan, self.name)
        self.weights.require_one_stage_a_rank(self.plan, self.name)
        if tp > 1 or tokens_too:
            check_plans(model, self.plan.parts.shapes, tp, tokens_too)
            self.tries_plan = any(map(is_of_user, model))
        self.tokens = token_layouts(model, tokens_too)
        self.forms = None
        if pp > 1 or tokens_too:
            own_part = partial(own_tokens, tp, self.tokens)
            self.forms = StageForms(model, self.plan, samples, self.runtime.precision, own_part)

    def setup(self, model: nn.Module) -> None:
        self._make_groups()
        if self.of_module is not None:
            self.module = self.of_module.setup(self, model, self._along_dp())
            self.forward = self.module
            self.is_metric_rank = self.mesh["tp"].get_local_rank() == 0
            return
        assert self.pp_group is not None
        if self.traced is not None:
            self.module = self.traced.place(model, self.to_device)
            self.executor = self.traced.executor(self.module, self.pp_group, self.task)
            self.is_metric_rank = self.executor.has_loss
            return
        assert isinstance(model, Chain)  # `partition`
        if self.tries_plan and not self.runtime.is_planned:
            self._try_blocks(model)
        stages = make_stages(model, self.plan, self.pp_rank, self.runtime.precision, self.autocast)
        for stage in stages.values():
            self._place(stage)

        self.module = self.weights.with_first_names(blocks_of(stages), self.pp_rank)
        self.forward = next(iter(stages.values()))  # the only stage, if there is no pipeline
        if self.axes["pp"] > 1:
            assert self.forms is not None
            self.executor = PipelineExecutor(
                self.plan, stages, self.forms, self.pp_group, self.task, self.device
            )
        has_loss = self.plan.num_stages - 1 in stages
        self.is_metric_rank = has_loss and self.mesh["tp"].get_local_rank() == 0

    def _try_blocks(self, model: Chain) -> None:
        """Compare users' blocks that are divided by their plans with the undivided ones."""
        from ddp_lab.strategies.block_trial import blocks_to_try, try_block

        assert isinstance(self.plan.parts, Partition)  # of a Chain
        along_tp = self.mesh["tp"]
        tokens_too = self.keys["sequence_parallel"]
        group, peer_sums = make_group(along_tp.get_group(), tokens_too, self.device)
        self.runtime.keep(peer_sums)
        for block in blocks_to_try(model, self.plan.parts.shapes):
            if peer_sums is not None:
                peer_sums.begin()
            try_block(block, group, along_tp, self.runtime, self.to_device)

    def _make_groups(self) -> None:
        self.mesh = self.runtime.mesh(self.axes)
        self.pp_group = self.mesh.get_group("pp")
        if min(self.axes["replicate"], self.axes["shard"]) > 1:
            axes = {"pp": self.axes["pp"], "dp": self.dp_size, "tp": self.axes["tp"]}
            self.dp_group = self.runtime.mesh(axes).get_group("dp")
        else:
            self.dp_group = self.mesh.get_group("shard" if self.sharded else "replicate")

    def _along_dp(self) -> DeviceMesh:
        """Return the ranks along dp: of two dimensions if there are several copies of shards."""
        return self.mesh["replicate", "shard"] if self.axes["replicate"] > 1 else self.mesh["shard"]

    def _place(self, stage: Stage) -> None:
        """Divide a stage over the ranks of its pp."""
        if self.initial_weights is None:
            stage.to(self.device)
        set_batch_norm(stage, self.batch_norm, self.dp_group)
        if self.axes["tp"] > 1:
            along_tp = self.mesh["tp"]
            group, self.peer_sums = make_group(
                along_tp.get_group(), self.keys["sequence_parallel"], self.device
            )
            self.runtime.keep(self.peer_sums)
            tokens = dict(
                zip(
                    self.plan.parts.names,
                    zip(self.tokens, self.tokens[1:], strict=False),
                    strict=True,
                )
            )
            tied = tied_parameters(stage)
            for name, block in stage.named_children():
                parallelize(block, along_tp, group, *tokens[name])
            tie(stage, tied)  # each block has got parameters of its own

        self.gradients.append(
            BlockGradients(stage, UnitOrder(self.runtime, self.name, None, self.peers()))
        )
        along_dp = self._along_dp()
        # Blocks with the same parameter are gathered together, with the stage.
        units = [block for block in stage.children() if is_self_contained(block, stage)]
        self.shard([*units, stage], along_dp, reshard_after_forward=self.axes["pp"] == 1)
        if self.initial_weights is not None:
            fill(stage, self.initial_weights, self.device)

    def shard_unit(self, unit: nn.Module, shard: Callable[[nn.Module], object]) -> None:
        if self.of_module is not None:
            self.of_module.hooks.before_sharding(unit)
            super().shard_unit(unit, shard)
            self.of_module.hooks.after_sharding(unit)
            return
        if not isinstance(unit, Stage) and any(
            parameter.requires_grad for parameter in unit.parameters()
        ):
            unit.register_forward_hook(eager(need_gradient))
        self.gradients[-1].before_sharding(unit)
        super().shard_unit(unit, shard)
        self.gradients[-1].after_sharding(unit)

    def peers(self) -> list[int]:
        """Return the ranks with this rank's blocks, itself included, each with its own batches."""
        tp = self.axes["tp"]
        first = self.runtime.rank - self.dp_rank * tp
        return [first + tp * replica for replica in range(self.dp_size)]

    def describe(self) -> str:
        if self.of_module is not None:
            return self.of_module.describe(self)
        (pp, replicate, shard, tp) = self.axes.values()
        parts = self.plan.parts
        if self.traced is not None:
            stages = parts.describe([f"pp {stage % pp}" for stage in range(self.plan.num_stages)])
            layout = f"mesh on {self.where}: pp {pp} x dp {self.dp_size}"
            return f"{layout}, {stages}, {self.plan.describe()}"
        lines = [
            f"mesh on {self.where}:",
            f"pp {pp} x dp {self.dp_size} x tp {tp}, dp = replicate {replicate} x shard {shard}",
        ]
        each = self.dp_size * tp
        for stage in range(pp):
            ends = [
                (parts.names[part[0]], parts.names[part[-1]]) for part in parts.parts[stage::pp]
            ]
            blocks = " and ".join(
                first if first == last else f"{first} .. {last}" for first, last in ends
            )
            first_rank = stage * each
            ranks = f"ranks {first_rank} to {first_rank + each - 1}"
            if each == 1:
                ranks = f"rank {first_rank}"
            lines.append(f"  pp {stage}  {ranks}  {blocks}")
        return "\n".join(lines if self.executor is None else [*lines, self.plan.describe()])

    def add_gradient(
        self, inputs: Tree, targets: Tree, num_valid: int, divisor: float | torch.Tensor
    ) -> torch.Tensor:
        if self.of_module is not None:
            self.of_module.hooks.has_samples = num_valid > 0
            return super().add_gradient(inputs, targets, num_valid, divisor)
        self.require_inputs(inputs)
        self._begin()
        for gradients in self.gradients:
            gradients.begin(num_valid > 0)
        if self.executor is None:
            self._check_tokens(inputs)
            return super().add_gradient(inputs, targets, num_valid, divisor)
        return self.executor.add_gradient(inputs, targets, num_valid, divisor)

    def predict(self, inputs: Tree) -> Any:
        if self.of_module is not None:
            return super().predict(inputs)
        self.require_inputs(inputs)
        self._begin()
        if self.executor is None:
            self._check_tokens(inputs)
            return super().predict(inputs)
        logits = self.executor.predict(inputs)
        forget_order(self.module)
        return logits

    def _begin(self) -> None:
        if self.peer_sums is not None:
            self.peer_sums.begin()

    def _check_tokens(self, inputs: Tree) -> None:
        """Raise a ConfigError if the ranks along tp cannot share the tokens of a batch.

        Called where the model is not cut into stages.
        """
        if self.forms is not None:
            assert isinstance(inputs, torch.Tensor)  # `require_inputs`
            self.forms.of(Form.of(inputs))

    @contextmanager
    def no_sync(self) -> Generator[None]:
        # torch's schedules sum the gradients after the last micro-batch of every
        # gradient-accumulation step.
        of_module = self.of_module.hooks.no_sync() if self.of_module else nullcontext()
        with of_module, nullcontext() if self.executor else super().no_sync():
            yield

    def reduce_gradients(self) -> None:
        if self.of_module is not None:
            self.of_module.reduce_gradients(self)
            return
        assert self.dp_group is not None
        for gradients in self.gradients:
            gradients.drop_unused(self.dp_group, self.device)
        assert self.pp_group is not None
        self.weights.sum_copies(self.module, self.pp_rank, self.pp_group)
        if self.traced is not None and self.dp_size > 1:
            with every_gradient(self):
                sum_gradients(self.module.parameters(), partial(flat, group=self.dp_group))

    def require_called_hooks(self, model: nn.Module) -> None:
        if self.traced is not None:
            from ddp_lab.strategies.traced_model import require_traceable

            require_traceable(model, self.name)
        super().require_called_hooks(model)

    def counted_parameters(self) -> Iterable[nn.Parameter]:
        if self.of_module is not None:
            return self.module.parameters()
        return self.weights.counted_once(self.module, self.pp_rank)

    def gradient_norm(self) -> torch.Tensor:
        if self.traced is not None:
            squares = super().gradient_norm().square()
            dist.all_reduce(squares, group=self.pp_group)
            return squares.sqrt()
        # Every rank adds its shards, divided by the number of ranks of its stage that have the same
        # ones.
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for gradient in cast("list[DTensor]", gradients_of(self.counted_parameters())):
            places = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
            shards = math.prod(size for place, size in places if not place.is_replicate())
            copies = self.dp_size * self.axes["tp"] / shards
            squares += real_view(local(gradient)).double().square().sum() / copies
        return self.runtime.all_reduce(squares).sqrt().to(torch.get_default_dtype())


def require_only_stages(keys: Mapping[str, Any], axes: Mapping[str, int], model: nn.Module) -> None:
    """Check that a mesh with stages of a module that is no Chain has no other axes than dp and pp.

    Args:
        keys: the options of the mesh.
        axes: sizes of its axes.
        model: that is no Chain.

    Raises:
        ConfigError: it has.
    """
    pp = axes["pp"]
    others = [f"strategy.{name}={axes[name]}" for name in ("tp", "shard") if axes[name] > 1]
    if keys["sequence_parallel"]:
        others.append("strategy.sequence_parallel=true")
    if others:
        raise ConfigError(
            f"strategy.pp={pp} {' '.join(others)}: {type(model).__name__} is no Chain of blocks, "
            f"so strategy.pp={pp} cuts it by a trace, whose stages have no layers that could be "
            "divided or sharded. Use strategy.pp with strategy.tp=1 strategy.shard=1, or "
            "strategy.tp and strategy.shard with strategy.pp=1, or return a Chain of blocks "
            "(docs/your-own.md)"
        )
