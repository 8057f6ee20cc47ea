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

How a block is divided is data beside the model: its plan, the attribute `tensor_parallel` of its
class. A block without a plan is computed by every rank. A plan is a dict from the names of the
block's modules to one of these words:

column   a linear layer of which each rank computes some units
heads    the same for units of attention heads, which stay together: each head has as many units as
         `head_width` of the module around it says
row      a linear layer that gets the units that the rank computed; the outputs of all ranks are
         summed
tokens   a module that computes every token separately, such as a LayerNorm
gather   a module without parameters of its own whose layers get all tokens, for example an
         attention

A block gets and returns tokens, [b, tokens, width], in one tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.models.boundaries import Form
from ddp_lab.models.chain import Chain, tied_parameters
from ddp_lab.strategies.activation_sums import TokenGroup
from ddp_lab.strategies.linear_pairs import ColumnLinear, RowLinear, Together

ALL = Replicate()  # each rank has all tokens
OWN = Shard(1)  # each rank has 1/tp of the tokens: [b, tokens / tp, width]
WORDS = ("column", "heads", "row", "tokens", "gather")


def plan_of(block: nn.Module) -> Mapping[str, str] | None:
    """Return the plan of a block; None if every rank computes it completely."""
    return getattr(block, "tensor_parallel", None)


def is_of_user(block: nn.Module) -> bool:
    """Return whether a block has a plan that is not one of ddp_lab's own, which are tested."""
    is_own = type(block).__module__.partition(".")[0] == "ddp_lab"
    return plan_of(block) is not None and not is_own


def plans_for(model: nn.Module, tp: int) -> tuple[dict[str, nn.Module], str]:
    """Return the blocks with a plan by name, and why they are not divided by it: "" if they are.

    Args:
        model: the complete model.
        tp: number of ranks that share a block.

    Raises:
        ConfigError: a plan does not fit its block.
    """
    blocks = {name: block for name, block in model.named_children() if plan_of(block) is not None}
    if not isinstance(model, Chain) or not blocks:
        return {}, "the model has no plan"
    tied = {name for names in tied_parameters(model) for name in names}
    for name, block in blocks.items():
        plan = plan_of(block) or {}
        check_names(name, block, plan)
        for size, counted in sizes_of(name, block, plan):
            if size % tp:
                return {}, f"strategy.tp={tp} does not divide the {size} {counted}"
        for path, word in plan.items():
            if word in ("column", "heads", "row") and f"{name}.{path}.weight" in tied:
                return {}, f"{name}.{path} shares its weight with another layer"
    return blocks, ""


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


def check_plans(
    model: Chain, shapes: Sequence[torch.Size], tp: int, sequence_parallel: bool
) -> None:
    """Check that the model's blocks can be divided as their plans require.

    Args:
        model: the complete model.
        shapes: shape of one sample's activation before each block, without the batch dimension; and
            after the last one.
        tp: number of ranks that share a block.
        sequence_parallel: whether they share the tokens, too.

    Raises:
        ConfigError: no block has a plan, a plan does not fit its block, or something is not
            divisible by `tp`.
    """
    if sequence_parallel and tp == 1:
        raise ConfigError(
            "strategy.sequence_parallel=true: needs ranks along tp that share the tokens; use "
            "strategy.tp=2 or more"
        )

    blocks = dict(model.named_children())
    if not any(map(plan_of, blocks.values())):
        raise ConfigError(
            f"strategy.tp={tp}: no block of the model has a plan for tensor parallelism. Give the "
            "class of its blocks "
            f"({', '.join(dict.fromkeys(type(block).__name__ for block in blocks.values()))}) the "
            "attribute tensor_parallel, as in ddp_lab/models/vit.py: a dict from the names of "
            f"their modules to {', '.join(WORDS)}. Or use strategy=tp, which needs no plan"
        )

    if buffers := [name for name, _ in model.named_buffers()]:
        raise ConfigError(
            f"strategy.tp={tp}: does not support models with buffers, got {buffers[0]}. Use "
            "strategy=tp, or strategy.tp=1"
        )

    require_equal_words(model, tp)
    for (name, block), shape in zip(blocks.items(), shapes, strict=False):
        if plan := plan_of(block):
            check_names(name, block, plan)
            for size, counted in sizes_of(name, block, plan):
                if size % tp:
                    raise ConfigError(
                        f"strategy.tp={tp}: must divide the {size} {counted}; use one of their "
                        "divisors"
                    )
            if sequence_parallel and shape[0] % tp:
                raise ConfigError(
                    f"strategy.sequence_parallel=true: strategy.tp={tp} must divide the {shape[0]} "
                    f"tokens before {name}. Use strategy.sequence_parallel=false, or another "
                    "number of tokens: vit has one less with model.pool=mean"
                )


def check_names(name: str, block: nn.Module, plan: Mapping[str, str]) -> None:
    """Check that a plan names all modules with parameters, and linear layers by their words.

    Raises:
        ConfigError: it does not.
    """
    key = f"{type(block).__name__}.tensor_parallel"
    modules = dict(block.named_modules())
    for path, word in plan.items():
        if path not in modules:
            raise ConfigError(
                f"{key}: {name} has no module {path}; it has {', '.join(filter(None, modules))}"
            )
        linear = is_linear(modules[path])
        if word not in (WORDS if linear else WORDS[-2:]):
            if linear:
                allowed = f"one of {', '.join(WORDS)}"
            else:
                allowed = "tokens or gather, because it is no nn.Linear"
            raise ConfigError(f"{key}: {path} must be {allowed}, got {word}")

    covered = tuple(f"{path}." for path, word in plan.items() if word != "gather")
    if missing := [path for path, _ in block.named_parameters() if not path.startswith(covered)]:
        raise ConfigError(
            f"{key}: must name the module of the parameter {missing[0]}, as one of "
            f"{', '.join(WORDS[:-1])}"
        )


def require_equal_words(model: Chain, tp: int) -> None:
    """Check that layers with the same parameter are divided alike.

    Args:
        model: whose plans name modules of their blocks.
        tp: number of ranks that share a block.

    Raises:
        ConfigError: two are not.
    """
    words = {
        f"{name}.{path}": "column" if word == "heads" else word
        for name, block in model.named_children()
        for path, word in (plan_of(block) or {}).items()
        if word in ("column", "heads", "row")
    }
    for first, *others in tied_parameters(model):
        layer = first.rpartition(".")[0]
        for other in others:
            other_layer = other.rpartition(".")[0]
            if words.get(layer) != words.get(other_layer):
                raise ConfigError(
                    f"strategy.tp={tp}: {other} is the same parameter as {first}, which is divided "
                    f"otherwise: {layer} is {words.get(layer, 'not divided')}, {other_layer} is "
                    f"{words.get(other_layer, 'not divided')}. Change the plan, or use strategy=tp"
                )


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is torch's linear layer, with weights not computed from others."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and isinstance(module.weight, nn.Parameter)
    )


def sizes_of(name: str, block: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Yield each number that `tp` must divide in a block, and what it counts."""
    modules: dict[str, Any] = dict(block.named_modules())
    for path, word in plan.items():
        layer = modules[path]
        if word == "heads":
            yield (
                layer.out_features // modules[path.rpartition(".")[0]].head_width,
                f"heads of {name}.{path}",
            )
        elif word == "column":
            yield layer.out_features, f"units of {name}.{path}"
        elif word == "row":
            yield layer.in_features, f"inputs of {name}.{path}"
