"""Full tensors of the shards that ranks hold, and shards of full tensors."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ddp_lab.strategies.base import local


def complete(state: Any) -> Any:
    """Return a state with full tensors on the CPU in place of shards on the device. Collective.

    Args:
        state: a dict, whose values may be dicts; the same keys in the same order on all ranks that share the tensors.
    """
    if isinstance(state, dict):
        return {key: complete(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        # Along dp first and then along tp: shards of shards cannot be gathered in one collective.
        along_tp = [place if place.is_shard() else Replicate() for place in state.placements]
        state = state.redistribute(placements=along_tp).full_tensor()
    return state.cpu() if isinstance(state, torch.Tensor) else state


@torch.no_grad()
def fill(tensor: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a full tensor, the same on every rank, to `tensor`, which may be a shard of it."""
    if isinstance(tensor, DTensor):
        full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
    local(tensor).copy_(local(full))
