"""Weights for the blocks that a rank holds, one block at a time."""

import torch
from torch import nn

from ddp_lab.models.initial_weights import InitialWeights, tensors_of


@torch.no_grad()
def fill(blocks: nn.Module, weights: "InitialWeights | PresentWeights", device: torch.device) -> None:
    """Allocate blocks that are on the meta device, and give them their weights. Not collective.

    Only one complete block at a time is in host memory.

    Args:
        blocks: its children are blocks of the model under their names; their parameters may be sharded (DTensors).
        device: where to allocate them.
    """
    for name, block in blocks.named_children():
        block.to_empty(device=device)
        whole = weights.of(name)
        for key, tensor in tensors_of(block).items():
            copy_shard(whole.pop(key), tensor)


class PresentWeights:
    """The weights that blocks have, for blocks that are then moved to the meta device.

    Args:
        blocks: its children are blocks of the model under their names.
    """

    def __init__(self, blocks: nn.Module):
        self.blocks = {name: tensors_of(block) for name, block in blocks.named_children()}

    def of(self, name: str) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of a block by their names within the block, once."""
        return self.blocks.pop(name)


def copy_shard(whole: torch.Tensor, own: torch.Tensor) -> None:
    """Copy a tensor that this rank has completely to `own`, which may be a DTensor: then this rank's shard of it."""
    if hasattr(own, "placements"):  # not isinstance: importing DTensor loads 500 modules
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(own, DTensor)
        whole = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None).to_local()
        own = own.to_local()
    own.copy_(whole)
