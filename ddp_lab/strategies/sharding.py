"""Shards: this rank's part of a tensor, full tensors of shards, and weights for the blocks and shards that a rank holds.

fully_shard.py shards a model, and training/optimizer.py lets an optimizer update the shards. DTensor is imported where it is
used, because that loads 500 modules.
"""

import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import tied_parameters

if TYPE_CHECKING:
    from ddp_lab.models.initial_weights import InitialWeights

Module = TypeVar("Module", bound=nn.Module)
Weights: TypeAlias = "InitialWeights | ShapesOnly"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; any other tensor is returned as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def sharded_as(tensor: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return a shard as a DTensor of the layout of `tensor`, without a copy; if `tensor` is none, return the shard as it is."""
    if not hasattr(tensor, "to_local"):
        return shard
    from torch.distributed.tensor import DTensor

    full = cast(DTensor, tensor)
    # The shape must be given: torch would otherwise compute it from this shard, and be wrong where shards differ in size.
    return DTensor.from_local(shard, full.device_mesh, full.placements, shape=full.shape, stride=full.stride())


def shard_like(full: Any, tensor: torch.Tensor) -> Any:
    """Return this rank's shard of a full tensor, as a DTensor of the layout of `tensor`. Not collective.

    What has another shape than `tensor`, or is no tensor, is returned as it is, and so is all if `tensor` is no DTensor.
    """
    if not hasattr(tensor, "placements") or not isinstance(full, torch.Tensor) or full.shape != tensor.shape:
        return full
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(tensor, DTensor)
    return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)


def full_tensor(tensor: torch.Tensor, keep: bool) -> torch.Tensor:
    """Return a copy of the full tensor of shards, or of a tensor that is no DTensor, in host memory. Collective.

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
    """Free gathered parameters, so that the shards can be changed. A module that is not sharded is left as it is.

    With reshard_after_forward=False an evaluation leaves the blocks gathered.
    """
    for part in module.modules():
        if hasattr(part, "reshard"):  # not isinstance: importing FSDPModule takes as long as importing DTensor
            cast(Any, part).reshard()


def make_contiguous(model: nn.Module) -> None:
    """Lay the parameters of a model out in memory in the order of their dimensions, of which the first one is sharded."""
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()


def to_device(blocks: Module, device: torch.device, weights: "Weights | None") -> Module:
    """Move blocks of the model to a device, or allocate them there with their initial weights, and return them.

    Args:
        blocks: its children are blocks of the model under their names.
        device: the device.
        weights: of blocks that are on the meta device (`Strategy.initial_weights`); None if they have their weights.
    """
    if weights is None:
        return blocks.to(device)
    fill(blocks, weights, device)
    return blocks


@torch.no_grad()
def fill(blocks: nn.Module, weights: "Weights", device: torch.device) -> None:
    """Allocate blocks that are on the meta device, and give them their weights. Not collective.

    Only one complete block at a time is in host memory.

    Args:
        blocks: its children are blocks of the model under their names; their parameters may be sharded (DTensors).
        device: where to allocate them.
    """
    from ddp_lab.models.initial_weights import tensors_of

    if isinstance(weights, ShapesOnly):
        return weights.allocate(blocks, device)
    for name, block in blocks.named_children():
        block.to_empty(device=device)
        full = weights.of(name)
        for key, tensor in tensors_of(block).items():
            local(tensor).copy_(local(shard_like(full.pop(key), tensor)))


class ShapesOnly:
    """Fake tensors in place of weights, for a step that is only planned (advise/plan.py).

    Args:
        fake: the mode in which tensors have shapes and no memory.
    """

    def __init__(self, fake: AbstractContextManager[object]):
        self.fake = fake

    def allocate(self, blocks: nn.Module, device: torch.device) -> None:
        """Allocate a module that is on the meta device. Tied parameters stay tied."""
        tied = tied_parameters(blocks)
        with self.fake:
            blocks.to_empty(device=device)
        for first, *others in tied:
            for path in others:
                module, _, name = path.rpartition(".")
                setattr(blocks.get_submodule(module), name, blocks.get_parameter(first))


def require_one_place(model: nn.Module, strategy: str, place_of: Callable[[str], Hashable], why: str) -> None:
    """Check that each parameter is in one place only; in each of several it would be a parameter of its own.

    Args:
        strategy: for the message.
        place_of: returns the place of a parameter by name: its stage, device or unit.
        why: what is wrong with the same parameter elsewhere, for the message.

    Raises:
        ConfigError: a parameter has names in different places.
    """
    for first, *others in tied_parameters(model):
        for name in others:
            if place_of(name) != place_of(first):
                raise ConfigError(
                    f"strategy={strategy}: {name} is the same parameter as {first}, which {why}. Use a copy, or another "
                    "strategy, for example ddp"
                )


def forget_layouts() -> None:
    """Clear what DTensor remembers of layouts, which refer to process groups that are closed. Equal meshes would find them."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # pyright: ignore
    torch._C._clear_DTensor_sharding_propagator_cache()  # pyright: ignore
    _redistribute._gen_transform_infos.cache_clear()  # pyright: ignore[reportPrivateUsage]


def has_hooks(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has hooks."""
    private: Any = parameter
    return bool(private._backward_hooks or private._post_accumulate_grad_hooks)
