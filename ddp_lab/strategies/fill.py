"""Weights for the blocks that a rank holds, one block at a time."""

from collections import defaultdict
from contextlib import AbstractContextManager

import torch
from torch import nn

from ddp_lab.models.initial_weights import InitialWeights, tensors_of


@torch.no_grad()
def fill(blocks: nn.Module, weights: "InitialWeights | PresentWeights | ShapesOnly", device: torch.device) -> None:
    """Allocate blocks that are on the meta device, and give them their weights. Not collective.

    Only one complete block at a time is in host memory.

    Args:
        blocks: its children are blocks of the model under their names; their parameters may be sharded (DTensors).
        device: where to allocate them.
    """
    if isinstance(weights, ShapesOnly):
        return weights.allocate(blocks, device)
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


class ShapesOnly:
    """Fake tensors in place of weights, for a step that is only planned (advise/plan.py).

    Args:
        fake: the mode in which tensors have shapes and no memory.
    """

    def __init__(self, fake: AbstractContextManager[object]):
        self.fake = fake

    def allocate(self, blocks: nn.Module, device: torch.device) -> None:
        """Allocate a module that is on the meta device. Tied parameters stay tied."""
        names = defaultdict[nn.Parameter, list[str]](list)
        for name, parameter in blocks.named_parameters(remove_duplicate=False):
            names[parameter].append(name)
        with self.fake:
            blocks.to_empty(device=device)
        for first, *others in names.values():
            for path in others:
                module, _, name = path.rpartition(".")
                setattr(blocks.get_submodule(module), name, blocks.get_parameter(first))

    def set_weights(self, state: dict[str, torch.Tensor]) -> None:
        """Do nothing: there are no weights to replace."""


def copy_shard(whole: torch.Tensor, own: torch.Tensor) -> None:
    """Copy a tensor that this rank has completely to `own`, which may be a DTensor: then this rank's shard of it."""
    if hasattr(own, "placements"):  # not isinstance: importing DTensor loads 500 modules
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(own, DTensor)
        whole = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None).to_local()
        own = own.to_local()
    own.copy_(whole)
