"""Single layers that are sharded over the ranks, by torch's parallel styles or as `ShardedConv2d`.

tp.py says what each rank computes of a layer that is sharded without a plan.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from ddp_lab.strategies.dtensor import local


class ShardedConv2d(nn.Conv2d):
    """A convolution with evenly sharded output channels: a layer of torch after `shard_channels`.

    DTensor has no sharding rule for this convolution. The parameters are DTensors, for checkpoints
    and norms, but the convolution is computed with their local shards.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the outputs, [b, o, h, w], for [b, c, height, width], both the same on every rank.

        Collective.

        Args:
            input: also of a single image, [c, height, width].
        """
        mesh = cast(DTensor, self.weight).device_mesh
        weight = local(self.weight)
        bias = None if self.bias is None else local(self.bias)
        # Backward sums the gradients that the ranks' channels contribute ("f" in Shoeybi et al.
        # 2019, arXiv:1909.08053).
        same = DTensor.from_local(input, mesh, [Replicate()], run_check=False).to_local(
            grad_placements=[Partial()]
        )
        own_channels = F.conv2d(same, weight, bias, self.stride, self.padding, self.dilation)
        channels = own_channels.dim() - 3  # a single image has no batch dimension
        outputs = DTensor.from_local(own_channels, mesh, [Shard(channels)], run_check=False)
        return outputs.full_tensor(grad_placements=[Replicate()]).clone()  # as `copied`


def shard_channels(conv: nn.Conv2d, mesh: DeviceMesh) -> None:
    """Make a ShardedConv2d of a convolution that `can_be_sharded`, in place.

    Its parameters are the same on every rank.

    Args:
        mesh: one-dimensional; its size divides the number of output channels.
    """
    for name, tensor in list(conv.named_parameters()):
        sharded = distribute_tensor(tensor.detach(), mesh, [Shard(0)])
        conv.register_parameter(name, nn.Parameter(sharded, requires_grad=tensor.requires_grad))
    conv.__class__ = ShardedConv2d  # as fully_shard changes the class of its modules


def copied(
    layer: nn.Module, inputs: tuple[torch.Tensor, ...], outputs: torch.Tensor
) -> torch.Tensor:
    """Return a copy of a sharded layer's gathered outputs, which an activation may change in place.

    What torch returns is a view, which autograd refuses to change in place, and of a linear layer
    its all_gather has only begun. The copy takes far less time than the all_gather, and what was
    gathered is freed at once.
    """
    return outputs.clone()


def positional(
    layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return a layer's input, layer(input=x), by position, where torch's hooks expect it."""
    return ((keywords["input"],), {}) if "input" in keywords else None


def parallelize_layer(
    layer: nn.Module, mesh: DeviceMesh, style: ParallelStyle, src_data_rank: int | None = 0
) -> None:
    """Divide a linear layer or an embedding by a style of torch, in place.

    It may be called by keyword, and its outputs may be changed in place, as before.

    Args:
        layer: its parameters are the same on every rank.
        mesh: one-dimensional.
        style: which units or inputs each rank gets.
        src_data_rank: as of torch: the rank whose parameters the others get; None: each rank has
            its own.
    """
    # before those of torch
    layer.register_forward_pre_hook(positional, with_kwargs=True)
    parallelize_module(layer, mesh, style, src_data_rank=src_data_rank)
    layer.register_forward_hook(copied)  # after those of torch


def can_be_sharded(layer: nn.Module, ranks: int) -> bool:
    """Return whether a layer's output channels or units can be divided evenly over the ranks.

    The layer must compute as torch does.

    That excludes groups, other padding than zeros, weights that are computed, and subclasses, which
    may compute something else or, as the out_proj of nn.MultiheadAttention, never be called. A
    class of ours that computes the same has the attribute `computes_like`.
    """
    kind = type(layer)
    known_kind = vars(kind).get("computes_like", kind)  # not what a subclass inherits
    if known_kind not in (nn.Conv2d, nn.Linear) or not isinstance(layer.weight, nn.Parameter):
        return False
    usual = not isinstance(layer, nn.Conv2d) or (
        layer.groups == 1 and layer.padding_mode == "zeros"
    )
    return usual and layer.weight.size(0) % ranks == 0
