"""Tensor parallelism for pairs of linear layers (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053).

The first layer of a pair computes some of its units on each rank, and the second one adds up what these units contribute. A
pair needs one collective in each direction, where the strategy tp needs two for each layer:

    tokens --+-- rank 0: q k v of heads 0 .. h/2 -- attention -- proj: sum over these heads --+-- all_reduce --> tokens
             +-- rank 1: q k v of heads h/2 .. h -- attention -- proj: sum over these heads --+

With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) each rank has 1/tp of the tokens between the pairs. The
all_reduce becomes a reduce_scatter, and an all_gather precedes the next pair. The ranks send as much as without it, but each
token is normalized by one rank only, and the activations between the pairs take 1/tp of the memory.

How a block is divided is data beside the model (tensor_parallel_plan.py). A block without a plan is computed by every rank.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from ddp_lab.models.chain import Chain
from ddp_lab.strategies.tensor_parallel_plan import plan_of

ALL = Replicate()  # each rank has all tokens
OWN = Shard(1)  # each rank has 1/tp of the tokens: [b, tokens / tp, width]


def token_layouts(model: Chain, sequence_parallel: bool) -> list[Placement]:
    """Return which tokens the ranks along tp have before each block, and after the last one.

    With sequence parallelism they share the tokens between two blocks if one of the two has a plan.
    """
    shared = [sequence_parallel and plan_of(block) is not None for block in model]
    return [OWN if any(pair) else ALL for pair in zip([False, *shared], [*shared, False], strict=True)]


class ReplicatedConv2d(nn.Conv2d):
    """A convolution of a replicated module, computed with each rank's own tensors.

    torch 2.11 takes the gradient of a replicated convolution's weight for one part of a sum over the ranks, so it would be
    counted once for each rank. torch 2.14 does not.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert isinstance(input, DTensor)
        found = [input, self.weight, *([] if self.bias is None else [self.bias])]
        images, weight, *bias = (cast(DTensor, tensor).to_local(grad_placements=[ALL]) for tensor in found)
        outputs = self._conv_forward(images, weight, bias[0] if bias else None)
        return DTensor.from_local(outputs, input.device_mesh, [ALL], run_check=False)


class Replicated(ParallelStyle):
    """A module whose parameters every rank has. They become DTensors, because fused optimizers need all of them on one mesh.

    Args:
        inputs, computes, outputs: tokens that the rank gets, computes with and returns: ALL or its OWN.
        clone: whether to return a tensor that is no view. fully_shard warns of views.
    """

    def __init__(self, inputs: Placement, computes: Placement, outputs: Placement, clone: bool = False):
        self.inputs, self.computes, self.outputs, self.clone = [inputs], [computes], [outputs], clone

    def _enter(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
        return tuple(
            DTensor.from_local(x, mesh, self.inputs, run_check=False).redistribute(mesh, self.computes) for x in inputs
        )

    def _leave(self, module: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        own = outputs.redistribute(mesh, self.outputs).to_local()
        return own.clone() if self.clone else own

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for layer in module.modules():
            if type(layer) is nn.Conv2d:
                layer.__class__ = ReplicatedConv2d  # as fully_shard changes the class of its modules
        enter, leave = cast("Any", self._enter), cast("Any", self._leave)  # torch annotates them as returning nothing
        return distribute_module(module, device_mesh, None, enter, leave)


def styles(plan: Mapping[str, str], outside: Placement) -> dict[str, ParallelStyle]:
    """Return torch's styles of the modules that a plan names.

    Args:
        plan: as in tensor_parallel_plan.py.
        outside: tokens that the rank has between the pairs: its OWN with sequence parallelism, otherwise ALL.
    """
    gathered = tuple(f"{name}." for name, word in plan.items() if word == "gather")

    def style(name: str, word: str) -> ParallelStyle:
        if word == "gather":
            return PrepareModuleInput(input_layouts=outside, desired_input_layouts=ALL, use_local_output=True)
        if word == "tokens":
            return Replicated(outside, outside, outside)
        if word == "row":
            return RowwiseParallel(output_layouts=outside)
        return ColwiseParallel(input_layouts=ALL if name.startswith(gathered) else outside)

    return {name: style(name, word) for name, word in plan.items()}


def parallelize(block: nn.Module, mesh: DeviceMesh, inputs: Placement, outputs: Placement) -> None:
    """Divide a block over the ranks of `mesh`, in place. Its parameters may be on the meta device.

    Args:
        block: a block whose plan has been checked.
        mesh: one-dimensional.
        inputs, outputs: tokens that the rank gets and returns: ALL or its OWN. For a block with a plan both are the same.
    """
    frozen = {name for name, parameter in block.named_parameters() if not parameter.requires_grad}
    plan = plan_of(block)
    how = Replicated(inputs, ALL, outputs, clone=True) if plan is None else styles(plan, inputs)
    parallelize_module(block, mesh, how, src_data_rank=None)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(name not in frozen)  # torch's styles make new parameters
