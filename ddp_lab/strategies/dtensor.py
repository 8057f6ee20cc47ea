"""DTensors: this rank's shard of a tensor, full tensors, and what torch remembers of them.

fully_shard.py shards a model, and training/optimizer.py lets an optimizer update the shards.
DTensor is imported where it is used, because that loads 500 modules.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

    from ddp_lab.models.stored_weights import StoredTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; any other tensor is returned as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def sharded_as(tensor: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return a shard as a DTensor of the layout of `tensor`, without a copy.

    If `tensor` is no DTensor, return the shard as it is.
    """
    if not hasattr(tensor, "to_local"):
        return shard
    from torch.distributed.tensor import DTensor

    full = cast(DTensor, tensor)
    # The shape must be given: torch would otherwise compute it from this shard, and be wrong where
    # shards differ in size.
    return DTensor.from_local(
        shard, full.device_mesh, full.placements, shape=full.shape, stride=full.stride()
    )


def shard_like(full: Any, tensor: torch.Tensor) -> Any:
    """Return this rank's shard of a full tensor, as a DTensor of the layout of `tensor`.

    Not collective.

    What has another shape than `tensor`, or is no tensor, is returned as it is, and so is all if
    `tensor` is no DTensor.
    """
    if (
        not hasattr(tensor, "placements")
        or not isinstance(full, torch.Tensor)
        or full.shape != tensor.shape
    ):
        return full
    like = cast("DTensor", tensor)
    return shard_of(full, like.device_mesh, like.placements)


def shard_of(
    full: torch.Tensor, mesh: "DeviceMesh", placements: Sequence["Placement"]
) -> "DTensor":
    """Return this rank's shard of a full tensor, which all ranks have, as a DTensor.

    Not collective.
    """
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def put(full: "torch.Tensor | StoredTensor", into: torch.Tensor) -> None:
    """Copy a full tensor into a tensor of its shape, or into this rank's shard of one.

    Of a tensor in a file only the shard is read, unless tensor parallelism divides it, too.
    """
    if not isinstance(full, torch.Tensor):
        part = part_of(into)
        if part is not None:
            local(into).copy_(full[part])
            return
        full = full.read()
    local(into).copy_(local(shard_like(full, into)))


def part_of(tensor: torch.Tensor) -> tuple[slice, ...] | None:
    """Return which part of a full tensor this rank has: a slice of each dimension.

    Return None if it is no such part. A tensor that is no DTensor is complete.
    """
    if not hasattr(tensor, "placements"):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shards = cast("DTensor", tensor)
    divided = [place.dim for place in shards.placements if place.is_shard()]  # pyright: ignore
    if len({*divided}) < len(divided):  # shards of shards of one dimension
        return None
    sizes, starts = compute_local_shape_and_global_offset(
        shards.shape, shards.device_mesh, shards.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def full_tensor(tensor: torch.Tensor, keep: bool) -> torch.Tensor:
    """Return a copy in host memory of a tensor, of shards the full tensor.

    Collective.

    Args:
        tensor: the same on all ranks that share it.
        keep: whether the result is used: a rank that only has to take part gets an empty tensor.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "placements"):
        from torch.distributed.tensor import DTensor, Replicate

        shards = cast(DTensor, tensor)
        # Along dp first and then along tp: shards of shards cannot be gathered in one collective.
        along_tp = [place if place.is_shard() else Replicate() for place in shards.placements]
        tensor = shards.redistribute(placements=along_tp).full_tensor()
    return tensor.to("cpu", copy=True) if keep else torch.empty(0)


def reshard(module: nn.Module) -> None:
    """Free gathered parameters, so that the shards can be changed.

    A module that is not sharded is left as it is.

    With reshard_after_forward=False an evaluation leaves the blocks gathered.
    """
    for part in module.modules():
        # not isinstance: importing FSDPModule takes as long as importing DTensor
        if hasattr(part, "reshard"):
            cast(Any, part).reshard()


def forget_layouts() -> None:
    """Clear what DTensor remembers of layouts, which refer to process groups that are closed.

    Equal meshes would find them.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # pyright: ignore
    torch._C._clear_DTensor_sharding_propagator_cache()  # pyright: ignore
    _redistribute._gen_transform_infos.cache_clear()  # pyright: ignore[reportPrivateUsage]
