"""A tensor of which this rank may hold a shard."""

from typing import cast

import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; any other tensor is returned as it is."""
    to_local = getattr(tensor, "to_local", None)  # not isinstance: importing DTensor loads 500 modules
    return tensor if to_local is None else to_local()


def sharded_as(tensor: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return a shard as a DTensor of the layout of `tensor`, without a copy; if `tensor` is none, return the shard as it is."""
    if not hasattr(tensor, "to_local"):
        return shard
    from torch.distributed.tensor import DTensor

    whole = cast(DTensor, tensor)
    # The shape must be given: torch would otherwise compute it from this shard, and be wrong where shards differ in size.
    return DTensor.from_local(shard, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride())
