"""Full tensors of the shards that ranks hold."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate


def complete(state: Any) -> Any:
    """Return a state with full tensors on the CPU in place of shards on the device. Collective.

    Args:
        state: a dict, whose values may be dicts; the same keys in the same order on all ranks that share the tensors.
    """
    if isinstance(state, dict):
        return {key: complete(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        state = state.to(state.device_mesh.device_type)  # collectives of GPUs need tensors there (offload.py)
        # Along dp first and then along tp: shards of shards cannot be gathered in one collective.
        along_tp = [place if place.is_shard() else Replicate() for place in state.placements]
        state = state.redistribute(placements=along_tp).full_tensor()
    return state.cpu() if isinstance(state, torch.Tensor) else state
