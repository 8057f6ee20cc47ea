"""Tensor parallelism for pairs of linear layers (Shoeybi et al. 2019, arXiv:1909.08053).

The first layer of a pair computes some of its units on each rank, and the second one adds up what
these units contribute. A pair needs one collective in each direction (linear_pairs.py), where
layers that are sharded one by one need two each (tp.py):

    tokens --+-- rank 0: q k v of heads 0 .. h/2 -- attention -- proj --+-- all_reduce --> tokens
             +-- rank 1: q k v of heads h/2 .. h -- attention -- proj --+

With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) each rank has 1/tp of the
tokens between the pairs. The all_reduce becomes a reduce_scatter, and an all_gather precedes the
next pair. The ranks send as much as without it, but each token is normalized by one rank only, and
the activations between the pairs take 1/tp of the memory.

The plan of a block says which layers make a pair (block_plans.py).
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.models.boundaries import Form
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.activation_sums import TokenGroup
from ddp_lab.strategies.block_plans import plan_of
from ddp_lab.strategies.linear_pairs import ColumnLinear, RowLinear, Together

ALL = Replicate()  # each rank has all tokens
OWN = Shard(1)  # each rank has 1/tp of the tokens: [b, tokens / tp, width]


def token_layouts(model: Chain, sequence_parallel: bool) -> list[Placement]:
    """Return which tokens the ranks along tp have before each block, and after the last one.

    With sequence parallelism they share the tokens between two blocks if one of the two has a plan.
    """
    shared = [sequence_parallel and plan_of(block) is not None for block in model]
    return [
        OWN if any(pair) else ALL for pair in zip([False, *shared], [*shared, False], strict=True)
    ]


def own_tokens(tp: int, layouts: Sequence[Placement], index: int, form: Form) -> Form:
    """Return the form of what a rank has before a block, for that of all tokens.

    Args:
        tp: number of ranks that share a block.
        layouts: from `token_layouts`.
        index: number of the block.
        form: of all tokens, [b, tokens, width].

    Raises:
        ConfigError: the ranks cannot share the tokens equally.
    """
    if layouts[index] != OWN:
        return form
    samples, tokens, *others = form.shape
    if tokens % tp:
        raise ConfigError(
            f"strategy.sequence_parallel=true: strategy.tp={tp} must divide the "
            f"{count(tokens, 'token')} that these inputs have before block {index} of the model. "
            "Pad the inputs, or use "
            "strategy.sequence_parallel=false"
        )
    return Form((samples, tokens // tp, *others), form.dtype)


class ReplicatedConv2d(nn.Conv2d):
    """A convolution of a replicated module, computed with each rank's own tensors.

    torch 2.11 takes the gradient of a replicated convolution's weight for one part of a sum over
    the ranks, so it would be counted once for each rank. torch 2.14 does not.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert isinstance(input, DTensor)
        operands = [input, self.weight, *([] if self.bias is None else [self.bias])]
        images, weight, *bias = (
            cast(DTensor, tensor).to_local(grad_placements=[ALL]) for tensor in operands
        )
        outputs = self._conv_forward(images, weight, bias[0] if bias else None)
        return DTensor.from_local(outputs, input.device_mesh, [ALL], run_check=False)


class Replicated(ParallelStyle):
    """A module whose parameters every rank has.

    They become DTensors, because fused optimizers need all of them on one mesh.

    Args:
        inputs, computes, outputs: tokens that the rank gets, computes with and returns: ALL or its
            OWN.
        clone: whether to return a tensor that is no view. fully_shard warns of views.
    """

    def __init__(
        self, inputs: Placement, computes: Placement, outputs: Placement, clone: bool = False
    ):
        self.inputs = [inputs]
        self.computes = [computes]
        self.outputs = [outputs]
        self.clone = clone

    def _enter(
        self, module: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh
    ) -> tuple[DTensor, ...]:
        return tuple(
            DTensor.from_local(x, mesh, self.inputs, run_check=False).redistribute(
                mesh, self.computes
            )
            for x in inputs
        )

    def _leave(self, module: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        own_outputs = outputs.redistribute(mesh, self.outputs).to_local()
        return own_outputs.clone() if self.clone else own_outputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for layer in module.modules():
            if type(layer) is nn.Conv2d:
                # as fully_shard changes the class of its modules
                layer.__class__ = ReplicatedConv2d
        # torch annotates them as returning nothing
        enter = cast("Any", self._enter)
        leave = cast("Any", self._leave)
        return distribute_module(module, device_mesh, None, enter, leave)


def divide_linear(layer: nn.Linear, mesh: DeviceMesh, word: str, replicate: bool) -> None:
    """Keep this rank's part of a linear layer, in place.

    Its parameters are the same on every rank, or on the meta device.

    Args:
        layer: its units, or for the word row its inputs, are divisible by the number of ranks.
        mesh: one-dimensional.
        word: of the layer in the plan: column, heads or row.
        replicate: whether parameters that are not divided become DTensors, too.
    """
    row = word == "row"
    for name, parameter in list(layer.named_parameters(recurse=False)):
        place: Placement = Shard(1 if row else 0)
        if row and name == "bias":
            if not replicate:
                continue
            place = ALL
        part = parameter.detach()
        if isinstance(place, Shard):
            part = part.chunk(mesh.size(), place.dim)[mesh.get_local_rank()].clone(
                memory_format=torch.contiguous_format
            )
        shard = DTensor.from_local(part, mesh, [place], run_check=False)
        layer.register_parameter(name, nn.Parameter(shard, parameter.requires_grad))
    # as fully_shard changes the class of its modules
    layer.__class__ = RowLinear if row else ColumnLinear


def divide(block: nn.Module, mesh: DeviceMesh, group: TokenGroup, replicate: bool) -> None:
    """Divide the linear layers of a block by its plan, in place.

    Its parameters may be on the meta device.

    Args:
        block: a block whose plan has been checked.
        mesh: one-dimensional.
        group: the ranks of `mesh`.
        replicate: whether the parameters of the other modules become DTensors.
    """
    plan = plan_of(block)
    assert plan is not None
    gathering = {path: Together(group) for path, word in plan.items() if word == "gather"}
    for path, together in gathering.items():
        module = block.get_submodule(path)
        module.register_forward_pre_hook(together.enter)
        module.register_forward_hook(together.leave)

    outside = OWN if group.share_tokens else ALL
    for path, word in plan.items():
        module = block.get_submodule(path)
        if isinstance(module, nn.Linear) and word in ("column", "heads", "row"):
            divide_linear(module, mesh, word, replicate)
        elif word == "tokens" and replicate:
            parallelize_module(
                module, mesh, Replicated(outside, outside, outside), src_data_rank=None
            )

        if isinstance(module, RowLinear):
            module.group = group
        elif isinstance(module, ColumnLinear):
            around = [
                together for gather, together in gathering.items() if path.startswith(f"{gather}.")
            ]
            module.together = around[-1] if around else Together(group)
            module.together.layers.append(module)


def parallelize(
    block: nn.Module, mesh: DeviceMesh, group: TokenGroup, inputs: Placement, outputs: Placement
) -> None:
    """Divide a block over the ranks of `mesh`, in place, so that all its parameters are DTensors.

    Args:
        block: a block whose plan has been checked. Its parameters may be on the meta device.
        mesh: one-dimensional.
        group: the ranks of `mesh`.
        inputs, outputs: tokens that the rank gets and returns: ALL or its OWN. For a block with a
            plan both are the same.
    """
    frozen = {name for name, parameter in block.named_parameters() if not parameter.requires_grad}
    if plan_of(block) is None:
        parallelize_module(
            block, mesh, Replicated(inputs, ALL, outputs, clone=True), src_data_rank=None
        )
    else:
        divide(block, mesh, group, replicate=True)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(name not in frozen)  # torch's styles make new parameters
