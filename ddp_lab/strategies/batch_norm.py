"""BatchNorm under data parallelism.

local: each rank normalises by the mean and variance of its local batch, so the result depends on the number of ranks.
sync:  all ranks normalise by the mean and variance of the global batch, as one device would. This costs two small collectives
       per layer in the forward pass and two in the backward pass. The padding of a partial last batch is excluded from the
       statistics (`Strategy.forward_backward`), so a rank's local batch may be empty.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from ddp_lab.config.errors import ConfigError

BatchNorm = Literal["local", "sync"]
Model = TypeVar("Model", bound=nn.Module)


class SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors, from which each rank computes its own loss; None as the group means all ranks.

    The gradient is therefore the sum of all ranks' gradients. torch's own function is deprecated since torch 2.15.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group  # pyright: ignore[reportAttributeAccessIssue]
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SyncBatchNorm(nn.BatchNorm2d):
    """A BatchNorm2d that normalises by the statistics of the global batch. `set_batch_norm` makes it of one of torch's.

    It replaces torch.nn.SyncBatchNorm, which has no CPU kernels, and whose backward pass gives a rank with an empty local batch
    no gradient at all: under FSDP that rank skipped collectives, and both ranks hung (two H200s, torch 2.11).

    Attributes:
        sum_over_ranks: returns the sum of all ranks' tensors, [n]; differentiable.
    """

    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise [b, channels, height, width]. In training this is collective, and b may be 0."""
        if not self.training:
            return super().forward(input)
        assert self.running_mean is not None
        dtype, inputs = input.dtype, input.to(self.running_mean.dtype)  # sums in bf16 are too coarse for statistics
        size = inputs.new_full((1,), inputs.numel() // inputs.size(1))
        total = self.sum_over_ranks(torch.cat([inputs.sum((0, 2, 3)), size]))
        mean, count = total[:-1] / total[-1], total[-1].detach()
        centred = inputs - mean.view(-1, 1, 1)
        variance = self.sum_over_ranks(centred.square().sum((0, 2, 3))) / count
        self._update_running_statistics(mean, variance * count / (count - 1))
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale.view(-1, 1, 1) + self.bias.view(-1, 1, 1)).to(dtype)

    @torch.no_grad()
    def _update_running_statistics(self, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(unbiased_variance, self.momentum)


def set_batch_norm(model: Model, mode: BatchNorm, group: dist.ProcessGroup | None = None) -> Model:
    """Make a SyncBatchNorm of every BatchNorm2d of `model` if `mode` is "sync". In place.

    Only the class of a layer is changed, so its parameters, names, hooks and other references to it stay.

    Args:
        model: already on its device.
        mode: "local" leaves the model as it is.
        group: ranks whose local batches are normalised together; None: all ranks.

    Returns:
        The model.

    Raises:
        ConfigError: a layer is of the user's own class, or not affine, or has no running statistics or momentum.
    """
    if mode == "local":
        return model
    # Excluded from compilation: with it compiled, ResNet-18's step was wrong (weights differed by 0.15; two H200s, torch 2.11).
    total = cast("Callable[[torch.Tensor], torch.Tensor]", torch.compiler.disable(lambda own: SumOverRanks.apply(own, group)))
    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            usual = layer.affine and layer.track_running_stats and layer.momentum is not None
            if type(layer) not in (nn.BatchNorm2d, SyncBatchNorm) or not usual:
                raise ConfigError(
                    f"strategy.batch_norm=sync: does not support the layer {name}, {layer}; allowed: nn.BatchNorm2d with "
                    "affine, momentum and track_running_stats. Use strategy.batch_norm=local"
                )
            layer.__class__ = SyncBatchNorm
            cast(SyncBatchNorm, layer).sum_over_ranks = total
    return model


def is_batch_norm(layer: nn.Module) -> bool:
    """Return whether `layer` is any of torch's BatchNorm layers: 1d, 2d, 3d or synchronised."""
    return isinstance(layer, nn.modules.batchnorm._BatchNorm)  # pyright: ignore[reportPrivateUsage], their only common base
