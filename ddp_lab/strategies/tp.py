"""Tensor parallelism: the work inside each layer is split. Every rank computes its share of a convolution's output channels
and of a linear layer's units, from the whole input, and the shares are joined.

    whole input --+-- rank 0: channels 0 .. c/2 --+-- all_gather: whole output
                  +-- rank 1: channels c/2 .. c --+

    and back:     its own channels of the output's gradient; all_reduce of the input's

Two collectives a layer, of the size of its activations: far more traffic than data parallelism has, so it wants ranks that
are close, and pays where one layer is too large for a device. The models know nothing of it: layers are replaced by name.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import get_total_norm

from ddp_lab.config.errors import ConfigError
from ddp_lab.config.types import Count
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.all_reduce import flat
from ddp_lab.strategies.base import Strategy, local
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm
from ddp_lab.strategies.collectives import copy_to_ranks, join_channels
from ddp_lab.world.runtime import Runtime


class ShardedConv2d(nn.Module):
    """A convolution of which every rank of `mesh` computes the same number of output channels.

    torch's DTensor has no rule for this; so the parameters are DTensors, and the computation is on their local parts.
    """

    def __init__(self, conv: nn.Conv2d, mesh: DeviceMesh):
        super().__init__()
        self.group = mesh.get_group()
        self.options = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
        assert conv.groups == 1, "a share of the output channels needs all input channels"
        assert conv.padding_mode == "zeros"
        for name, tensor in conv.named_parameters():
            self.register_parameter(name, nn.Parameter(distribute_tensor(tensor.detach(), mesh, [Shard(0)])))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to_local(), self.bias.to_local() if "bias" in self._parameters else None
        return join_channels(F.conv2d(copy_to_ranks(inputs, self.group), weight, bias, **self.options), self.group)


class TP(Strategy):
    """Tensor parallelism inside, data parallelism by an all_reduce outside.

    Args:
        tp: number of ranks that share each layer; null uses all ranks. The ranks divided by it is the number of replicas.
        plan: names of blocks with shard or replicate (every rank computes the complete block); blocks not named are sharded.
        batch_norm: ranks over which BatchNorm computes its statistics in training: each rank by itself (local) or all ranks
            of the data parallelism together (sync).

    Raises:
        ConfigError: channels or units that do not divide (in partition).
    """

    def __init__(
        self, runtime: Runtime, tp: Count | None, plan: dict[str, Literal["shard", "replicate"]] | None, batch_norm: BatchNorm
    ):
        super().__init__(runtime)
        self.lay_out(tp=tp or runtime.world_size)
        self.plan, self.batch_norm = plan or {}, batch_norm
        self.reports = runtime.rank % self.axes["tp"] == 0

    def partition(self, model: Chain, samples: int) -> None:
        size, blocks = self.axes["tp"], dict(model.named_children())
        for name, word in self.plan.items():
            if name not in blocks:
                raise ConfigError(f"strategy.plan.{name}={word}: the model has no such block; it has {', '.join(blocks)}")
        self.layers = {
            f"{name}.{path}".rstrip("."): layer
            for name, block in blocks.items()
            if self.plan.get(name) != "replicate"
            for path, layer in block.named_modules()
            if isinstance(layer, nn.Conv2d | nn.Linear)
        }
        odd = {path: layer.weight.size(0) for path, layer in self.layers.items() if layer.weight.size(0) % size}
        if odd:
            words = ", ".join(
                f"the {width} {'channels' if isinstance(self.layers[path], nn.Conv2d) else 'units'} of {path}"
                for path, width in odd.items()
            )
            whole = ",".join(f"{name}:replicate" for name in dict.fromkeys(path.split(".")[0] for path in odd))
            raise ConfigError(
                f"strategy.tp={size}: {words} do not divide by {size}. Use a tp that divides them, or leave those blocks "
                f"whole: 'strategy.plan={{{whole}}}'"
            )

    def setup(self, model: Chain) -> None:
        mesh = self.runtime.mesh(self.axes)
        self.dp_group = mesh.get_group("dp")
        self.module = self.forward = set_batch_norm(model.to(self.device), self.batch_norm, self.dp_group)
        for path, layer in self.layers.items():
            if isinstance(layer, nn.Linear):
                parallelize_module(layer, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
            else:
                model.set_submodule(path, ShardedConv2d(layer, mesh["tp"]))

    def describe(self) -> str:
        whole = [name for name, word in self.plan.items() if word == "replicate"]
        return (
            f"tp on {self.where}: dp {self.dp_size} x tp {self.axes['tp']}; {len(self.layers)} layers sharded by output "
            f"channels and units, {', '.join(whole) or 'no block'} left whole"
        )

    @torch.no_grad()
    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().predict(inputs).clone()  # waits for the last all_gather, which torch's Linear only begins

    def reduce_gradients(self) -> None:
        if self.dp_size > 1:
            gradients = [local(parameter.grad) for parameter in self.parameters()]
            torch._foreach_copy_(gradients, flat(gradients, self.dp_group))  # in place: some are a DTensor's own part

    def param_groups(self) -> list[dict[str, Any]]:
        # DTensors and tensors (BatchNorm's, say) are mixed, which the optimizers' one call for all parameters cannot take.
        return [group | {"foreach": False} for group in super().param_groups()]

    def gradient_norm(self) -> torch.Tensor:
        """Of the sharded gradients each rank has a part, of the replicated ones the whole."""
        gradients = [parameter.grad for parameter in self.parameters()]
        sharded = get_total_norm([gradient for gradient in gradients if isinstance(gradient, DTensor)])
        replicated = get_total_norm([gradient for gradient in gradients if not isinstance(gradient, DTensor)])
        norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm.to(self.device) for norm in (sharded, replicated)]
        return torch.stack(norms).norm()
