"""torch's `fully_shard` as `fsdp` and `mesh` use it: which modules are sharded, how, and what they need in a step.

With `strategy.offload=true` the shards, their gradients and the optimizer's state are in host memory:

    host:  shards of parameters --copy--> GPU: all_gather -> block -> reduce_scatter --copy--> host: shards of gradients
           optimizer's step on the CPU

It costs a copy of the rank's shards to the GPU for every gather, one of the gradients back, and a slower optimizer's step. It
leaves the GPU's memory to activations and one gathered block (Ren et al. 2021, ZeRO-Offload, arXiv:2101.06840).
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from ddp_lab.config.errors import ConfigError
from ddp_lab.observe.log import log
from ddp_lab.strategies.activation_checkpointing import Checkpointing
from ddp_lab.strategies.batch_norm import is_batch_norm

HOST = torch.device("cpu")


def require_shardable(model: nn.Module, strategy: str, offload: bool) -> None:
    """Check that the parameters of the model can be sharded and, with `offload`, kept in host memory.

    Raises:
        ConfigError: a parameter has no dimensions; or the model has buffers, which stay on the GPU: torch cannot load a state
            whose tensors are on two devices.
    """
    if scalars := [name for name, parameter in model.named_parameters() if parameter.dim() == 0]:
        raise ConfigError(
            f"strategy={strategy}: cannot shard the parameter {scalars[0]}, which has no dimensions. Give it the shape [1], or "
            "use another strategy, for example ddp"
        )
    if offload and (buffers := [name for name, _ in model.named_buffers()]):
        raise ConfigError(
            f"strategy.offload=true: is not supported by models with buffers, such as BatchNorm's statistics; this one has "
            f"{buffers[0]}. Use strategy.offload=false"
        )


def units(model: nn.Module, wrap: list[str] | None) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together, inner modules before those that contain them.

    Args:
        wrap: names of their classes; None: the children of the model and of its lists of blocks that have parameters.
    """
    if wrap is not None:
        found = [module for module in model.modules() if type(module).__name__ in wrap and module is not model]
    else:
        parents = [model, *filter(is_list, model.modules())]
        found = [child for parent in parents for child in parent.children() if any(True for _ in child.parameters())]
        found = [child for child in found if not is_list(child)]
    depth = {module: name.count(".") for name, module in model.named_modules()}
    return sorted(dict.fromkeys(found), key=lambda module: -depth[module])


def is_list(module: nn.Module) -> bool:
    """Return whether a module is a list of blocks: a ModuleList, or an nn.Sequential with several blocks of one class.

    A block has modules of its own and is no nn.Sequential. An nn.Sequential of such lists is a list, too.
    """
    if not isinstance(module, nn.Sequential):
        return isinstance(module, nn.ModuleList)
    blocks = [child for child in module.children() if not isinstance(child, nn.Sequential) and any(child.children())]
    return len({type(block) for block in blocks}) < len(blocks) or any(map(is_list, module.children()))


def tied_over(model: nn.Module, units: list[nn.Module]) -> list[str]:
    """Return two names of a parameter that belongs to modules of two units, and so would be in two shards; [] if none does.

    Args:
        units: as returned by `units`; a module belongs to the innermost unit that contains it, or to the model itself.
    """
    unit_of: dict[nn.Module, nn.Module] = {}
    for unit in [*units, model]:
        for module in unit.modules():
            unit_of.setdefault(module, unit)
    first: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            unit, other = first.setdefault(parameter, (unit_of[module], name))
            if unit is not unit_of[module]:
                return [other, name]
    return []


def shard(parts: list[nn.Module], mesh: DeviceMesh, reshard_after_forward: bool, precision: str, offload: bool) -> None:
    """Shard the parameters of each part over the ranks of `mesh`, in place.

    Args:
        parts: inner modules before those that contain them; the last one contains all others.
        mesh: of one dimension; or of two, along the first of which the shards are replicated.
        reshard_after_forward: whether to free a part's gathered parameters between its forward and its backward pass.
        precision: float32 or bf16, in which the parts then compute, with float32 shards and sums of gradients.
        offload: whether the shards are in host memory: of a GPU in pinned memory, so that copies overlap with computation.
    """
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        # BatchNorm's kernels need parameters in float32, as the statistics are; the inputs may be in bf16.
        for layer in filter(is_batch_norm, parts[-1].modules()):
            keep = MixedPrecisionPolicy(cast_forward_inputs=False)
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=keep)
    on_gpu = mesh.device_type == "cuda"
    where = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()
    copy = cast("Callable[..., Any]", torch.compiler.disable(copy_views))  # not at the top: it loads torch.compile in 1 s
    for part in parts:
        part.register_forward_hook(copy)  # before torch's own hook, which is not compiled, either
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy, offload_policy=where)


def log_offload(offload: bool, device: torch.device) -> None:
    """Log that `strategy.offload` has no effect if the device is the CPU."""
    if offload and device.type == "cpu":
        log.info("strategy.offload=true has no effect: the device is the CPU, whose memory is that of the host")


def copy_views(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """Return the output of a part with copies of the tensors that are views.

    torch gathers a part for its backward pass in a hook on its output. If the output is a view, for example the last output of
    an LSTM, and is then changed in place, torch drops this hook, and the backward pass fails or is wrong. torch only warns.
    """
    return tree_map_only(torch.Tensor, lambda tensor: tensor if tensor._base is None else tensor.clone(), output)


def sharded_in(module: nn.Module) -> list[FSDPModule]:
    """Return the parts of `module`, and the module itself, that `shard` has sharded."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


@contextmanager
def without_sync(module: nn.Module) -> Generator[None]:
    """Let backward passes of a sharded module leave its gradients unsharded, until a pass outside of this context.

    Every rank keeps unsharded gradients meanwhile, so gradient accumulation costs the memory that sharding them saves.
    """
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def forget_order(module: nn.Module) -> None:
    """Let torch forget in which order the parts of `module` ran forward; called after a forward pass without a backward pass.

    A backward pass gathers parts in advance, in the reverse order of all forward passes since the last one. With those of an
    evaluation before it, it gathers one part too many, whose buffer torch frees early: the next forward pass then computed with
    wrong parameters if it followed at once, as in gradient accumulation (torch 2.11, two H200s). There is no public function.
    """
    for part in sharded_in(module):
        part._get_fsdp_state()._comm_ctx.post_forward_order.clear()  # pyright: ignore[reportPrivateUsage]


def refused(checkpointing: Checkpointing, offload: bool) -> dict[str, str]:
    """Return why options of a sharded model exclude performance options (`Strategy.refusals`)."""
    reasons: dict[str, str] = {}
    if checkpointing != "none":
        reasons["cuda_graph"] = (
            f"strategy.checkpoint_activations={checkpointing} keeps the state of the random generators on the host"
        )
    if checkpointing == "selective":
        reasons["compile"] = (
            "strategy.checkpoint_activations=selective keeps results of single operations, which a compiled block fuses; use "
            "block"
        )
    if offload:
        reasons["cuda_graph"] = "with strategy.offload=true the optimizer's step is on the CPU"
    return reasons
