"""A mesh of a Chain: its blocks are divided over tp, sharded over dp, and cut into stages over pp.

Each block is divided over tp (divided_blocks.py), and then `fully_shard` is applied to it, also
with a shard of one rank. Every parameter is therefore a DTensor of the same mesh, which optimizers,
clipping, averages and checkpoints treat alike.

Without replicas (dp 1) there is nothing to gather, and there are no gradients to sum over dp.
`fully_shard` would only copy: it is left out, and a block computes with its parameters as under tp.
"""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.trees import Tree
from ddp_lab.models.boundaries import Form
from ddp_lab.models.chain import Chain, tie, tied_parameters
from ddp_lab.models.partition import Partition
from ddp_lab.strategies.activation_sums import make_group
from ddp_lab.strategies.all_reduce import flat
from ddp_lab.strategies.batch_norm import set_batch_norm
from ddp_lab.strategies.block_gradients import BlockGradients, need_gradient
from ddp_lab.strategies.block_plans import check_plans, is_of_user, plan_of
from ddp_lab.strategies.divided_blocks import divide, own_tokens, parallelize, token_layouts
from ddp_lab.strategies.dtensor import local, sharded_as
from ddp_lab.strategies.gradients import by_dtype, gradient_of
from ddp_lab.strategies.mesh_model import MeshModel, Placed
from ddp_lab.strategies.parameters import fill
from ddp_lab.strategies.peer_sums import PeerSums
from ddp_lab.strategies.schedules import PipelinePlan
from ddp_lab.strategies.stage_forms import StageForms
from ddp_lab.strategies.stage_weights import StageWeights
from ddp_lab.strategies.stages import PipelineExecutor, Stage, blocks_of, make_stages
from ddp_lab.strategies.unit_gradients import eager
from ddp_lab.strategies.unit_order import UnitOrder
from ddp_lab.strategies.units import is_self_contained

if TYPE_CHECKING:
    from ddp_lab.strategies.mesh import Mesh


class MeshOfBlocks(MeshModel):
    """What a mesh does with a Chain of blocks.

    Attributes:
        plan: of the stages; without a pipeline there is one.
        weights: places of the parameters and buffers.
        tokens: layout of the tokens before and after each block.
        forms: of the stages' inputs; None: nothing depends on them. These four are known after
            `partition`.
    """

    plan: PipelinePlan
    weights: StageWeights
    forms: StageForms | None

    def __init__(self) -> None:
        self.executor: PipelineExecutor | None = None
        self.peer_sums: PeerSums | None = None
        self.gradients: list[BlockGradients] = []  # of each stage of this rank

    def partition(self, mesh: "Mesh", model: nn.Module, samples: int) -> None:
        assert isinstance(model, Chain)
        tp = mesh.axes["tp"]
        pp = mesh.axes["pp"]
        tokens_too = mesh.keys["sequence_parallel"]

        if pp > 1:
            self.plan = PipelinePlan.make(mesh.keys, model, pp, samples)
            self.bubble = self.plan.bubble
        elif mesh.keys["cut"]:
            raise ConfigError(
                "strategy.cut: is only used if strategy.pp is above 1, got strategy.pp=1"
            )
        else:
            self.plan = PipelinePlan("gpipe", 1, 1, Partition(model, 1))
        assert isinstance(self.plan.parts, Partition)  # of a Chain
        self.weights = StageWeights.of_chain(model, self.plan, mesh.name)
        self.weights.require_one_stage_a_rank(self.plan, mesh.name)
        if tp > 1 or tokens_too:
            check_plans(model, self.plan.parts.shapes, tp, tokens_too)
            self.tries_plan = any(map(is_of_user, model))
            if mesh.written:
                from ddp_lab.strategies.written_weights import refuse_sharded

                refuse_sharded(mesh, layers_of_plans(model))
        self.tokens = token_layouts(model, tokens_too)
        self.forms = None
        if pp > 1 or tokens_too:
            own_part = partial(own_tokens, tp, self.tokens)
            self.forms = StageForms(model, self.plan, samples, mesh.runtime.precision, own_part)

    def setup(self, mesh: "Mesh", model: nn.Module) -> Placed:
        assert mesh.pp_group is not None
        assert isinstance(model, Chain)  # `partition`
        if self.tries_plan and not mesh.runtime.is_planned:
            self._try_blocks(mesh, model)
        # the outputs of the only stage are sent to no one
        precision = mesh.runtime.precision if mesh.axes["pp"] > 1 else "float32"
        stages = make_stages(model, self.plan, mesh.pp_rank, precision, mesh.autocast)
        for stage in stages.values():
            self._place(mesh, stage)

        module = self.weights.with_first_names(blocks_of(stages))
        if mesh.axes["pp"] > 1:
            assert self.forms is not None
            self.executor = PipelineExecutor(
                plan=self.plan,
                stages=stages,
                forms=self.forms,
                group=mesh.pp_group,
                task=mesh.task,
                device=mesh.device,
            )
        has_loss = self.plan.num_stages - 1 in stages
        is_metric_rank = has_loss and mesh.mesh["tp"].get_local_rank() == 0
        only = next(iter(stages.values()))  # the only stage, if there is no pipeline
        return Placed(module, is_metric_rank, self.executor, only)

    def _try_blocks(self, mesh: "Mesh", model: Chain) -> None:
        """Compare users' blocks that are divided by their plans with the undivided ones."""
        from ddp_lab.strategies.block_trial import blocks_to_try, try_block

        assert isinstance(self.plan.parts, Partition)  # of a Chain
        along_tp = mesh.mesh["tp"]
        tokens_too = mesh.keys["sequence_parallel"]
        group, peer_sums = make_group(along_tp.get_group(), tokens_too, mesh.device)
        mesh.runtime.keep(peer_sums)
        for block in blocks_to_try(model, self.plan.parts.shapes):
            if peer_sums is not None:
                peer_sums.begin()
            try_block(block, group, along_tp, mesh.runtime, mesh.to_device)

    def _place(self, mesh: "Mesh", stage: Stage) -> None:
        """Divide a stage over the ranks of its pp."""
        if mesh.initial_weights is None:
            stage.to(mesh.device)
        set_batch_norm(stage, mesh.batch_norm, mesh.dp_group)
        if mesh.axes["tp"] > 1:
            self._divide(mesh, stage)
        if mesh.dp_size > 1:
            self._shard(mesh, stage)
        if mesh.initial_weights is not None:
            fill(stage, mesh.initial_weights, mesh.device)

    def _divide(self, mesh: "Mesh", stage: Stage) -> None:
        """Divide the blocks of a stage over tp."""
        along_tp = mesh.mesh["tp"]
        tokens_too = mesh.keys["sequence_parallel"]
        group, self.peer_sums = make_group(along_tp.get_group(), tokens_too, mesh.device)
        mesh.runtime.keep(self.peer_sums)
        around = zip(self.tokens, self.tokens[1:], strict=False)
        tokens = dict(zip(self.plan.parts.names, around, strict=True))
        tied = tied_parameters(stage)
        for name, block in stage.named_children():
            if mesh.dp_size > 1 or tokens_too:
                parallelize(block, along_tp, group, *tokens[name])
            elif plan_of(block) is not None:
                divide(block, along_tp, group, replicate=False)
        tie(stage, tied)  # each block has got parameters of its own

    def _shard(self, mesh: "Mesh", stage: Stage) -> None:
        """Shard the parameters of a stage over dp, or sum their gradients there."""
        self.gradients.append(
            BlockGradients(stage, UnitOrder(mesh.runtime, mesh.name, None, mesh.peers()))
        )
        along_dp = mesh.along_dp()
        # Blocks with the same parameter are gathered together, with the stage.
        units = [block for block in stage.children() if is_self_contained(block, stage)]
        mesh.shard([*units, stage], along_dp, reshard_after_forward=mesh.axes["pp"] == 1)

    def before_sharding(self, unit: nn.Module) -> None:
        if not isinstance(unit, Stage) and any(
            parameter.requires_grad for parameter in unit.parameters()
        ):
            unit.register_forward_hook(eager(need_gradient))
        self.gradients[-1].before_sharding(unit)

    def after_sharding(self, unit: nn.Module) -> None:
        self.gradients[-1].after_sharding(unit)

    def begin_step(self, inputs: Tree, has_samples: bool) -> None:
        self._begin_sums()
        for gradients in self.gradients:
            gradients.begin(has_samples)
        self._check_tokens(inputs)

    def begin_prediction(self, inputs: Tree) -> None:
        self._begin_sums()
        self._check_tokens(inputs)

    def _begin_sums(self) -> None:
        if self.peer_sums is not None:
            self.peer_sums.begin()

    def _check_tokens(self, inputs: Tree) -> None:
        """Raise a ConfigError if the ranks along tp cannot share the tokens of a batch.

        A model that is cut into stages is checked by its executor.
        """
        if self.executor is None and self.forms is not None:
            assert isinstance(inputs, torch.Tensor)  # `require_inputs`
            self.forms.of(Form.of(inputs))

    def reduce_gradients(self, mesh: "Mesh") -> None:
        assert mesh.dp_group is not None
        for gradients in self.gradients:
            gradients.drop_unused(mesh.dp_group, mesh.device)
        if mesh.dp_size == 1 and mesh.keys["sequence_parallel"]:
            sum_parts(mesh.module, mesh.mesh["tp"].get_group())
        assert mesh.pp_group is not None
        self.weights.sum_copies(mesh.module, mesh.pp_rank, mesh.pp_group)

    def counted_parameters(self, mesh: "Mesh") -> Iterable[nn.Parameter]:
        return self.weights.counted_once(mesh.module, mesh.pp_rank)

    def describe(self, mesh: "Mesh") -> str:
        (pp, replicate, shard, tp) = mesh.axes.values()
        parts = self.plan.parts
        lines = [
            f"mesh on {mesh.where}:",
            f"pp {pp} x dp {mesh.dp_size} x tp {tp}, dp = replicate {replicate} x shard {shard}",
        ]
        each = mesh.dp_size * tp
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


def layers_of_plans(model: Chain) -> list[str]:
    """Return the names of all modules of blocks that are divided by a plan."""
    return [
        f"{name}.{path}" if path else name
        for name, block in model.named_children()
        if plan_of(block) is not None
        for path, _ in block.named_modules()
    ]


def sum_parts(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of which each rank has the part of its own tokens, in place. Collective.

    Those are the gradients of what is not divided in blocks with shared tokens: normalization
    layers and the biases of row layers.

    Args:
        module: after the last backward pass of a step.
        group: the ranks that share the tokens.
    """
    in_parts = [parameter for parameter in module.parameters() if is_in_parts(parameter.grad)]
    for parameters in by_dtype(in_parts):
        parts = [local(gradient_of(parameter)) for parameter in parameters]
        for parameter, total in zip(parameters, flat(parts, group), strict=True):
            parameter.grad = sharded_as(parameter, total)


def is_in_parts(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient is the sum of what the ranks have."""
    return isinstance(gradient, DTensor) and any(
        place.is_partial() for place in gradient.placements
    )
