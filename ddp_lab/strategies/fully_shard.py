"""torch's `fully_shard` as `fsdp` and `mesh` use it: how modules are sharded, and what sharded modules need in a step."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from ddp_lab.strategies.activation_checkpointing import Checkpointing
from ddp_lab.strategies.batch_norm import is_batch_norm


def shard(
    parts: list[nn.Module], mesh: DeviceMesh, reshard_after_forward: bool, precision: str, offload: OffloadPolicy
) -> None:
    """Shard the parameters of each part over the ranks of `mesh`, in place.

    Args:
        parts: inner modules before those that contain them; the last one contains all others.
        mesh: of one dimension; or of two, along the first of which the shards are replicated.
        reshard_after_forward: whether to free a part's gathered parameters between its forward and its backward pass.
        precision: float32 or bf16, in which the parts then compute, with float32 shards and sums of gradients.
        offload: whether the shards are in host memory.
    """
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        # BatchNorm's kernels need parameters in float32, as the statistics are; the inputs may be in bf16.
        for layer in filter(is_batch_norm, parts[-1].modules()):
            keep = MixedPrecisionPolicy(cast_forward_inputs=False)
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=keep)
    copy = cast("Callable[..., Any]", torch.compiler.disable(copy_views))  # not at the top: it loads torch.compile in 1 s
    for part in parts:
        part.register_forward_hook(copy)  # before torch's own hook, which is not compiled, either
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy, offload_policy=offload)


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
