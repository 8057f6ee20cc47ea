"""BatchNorm under data parallelism.

local: each rank normalises by the mean and variance of its local batch, so the result depends on the number of ranks.
sync:  all ranks normalise by the mean and variance of the global batch, as one device would. This costs two small collectives
       per layer in the forward pass and two in the backward pass. The padding of a partial last batch is excluded from the
       statistics (Strategy.forward_backward), so a rank's local batch may be empty.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.strategies.collectives import sum_over_ranks

BatchNorm = Literal["local", "sync"]
Model = TypeVar("Model", bound=nn.Module)


class WrittenBatchNorm(nn.BatchNorm2d):
    """A BatchNorm2d for a forward pass written out in simple operations, in the place of one of torch's.

    Args:
        layer: layer to replace; its parameters and buffers are shared. It must be affine and track running statistics with a
            momentum, as nn.BatchNorm2d does by default.
    """

    def __init__(self, layer: nn.BatchNorm2d):
        super().__init__(layer.num_features, layer.eps, layer.momentum, device="meta")  # allocates nothing
        self.weight, self.bias = layer.weight, layer.bias
        for name, buffer in layer.named_buffers():
            setattr(self, name, buffer)
        self.train(layer.training)

    @torch.no_grad()
    def _update_running_statistics(self, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(unbiased_variance, self.momentum)


class SyncBatchNorm(WrittenBatchNorm):
    """A BatchNorm2d that normalises by the statistics of the global batch.

    It replaces torch.nn.SyncBatchNorm, which has no CPU kernels, and whose backward pass gives a rank with an empty local batch
    no gradient at all: under FSDP that rank skipped collectives, and both ranks hung (two H200s, torch 2.11).

    Args:
        layer: layer to replace, as in `WrittenBatchNorm`.
        sum_over_ranks: returns the sum of all ranks' tensors, [n]; differentiable.
    """

    def __init__(self, layer: nn.BatchNorm2d, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(layer)
        self.sum_over_ranks = sum_over_ranks

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


def set_batch_norm(model: Model, mode: BatchNorm, group: dist.ProcessGroup | None = None) -> Model:
    """Replace every BatchNorm2d of `model` by a SyncBatchNorm if `mode` is "sync". In place.

    Parameters and buffers stay the same objects under the same names.

    Args:
        model: already on its device.
        mode: "local" leaves the model as it is.
        group: ranks whose local batches are normalised together; None: all ranks.

    Returns:
        The model.
    """
    if mode == "local":
        return model
    # Excluded from compilation: with it compiled, ResNet-18's step was wrong (weights differed by 0.15; two H200s, torch 2.11).
    total = cast(Callable[[torch.Tensor], torch.Tensor], torch.compiler.disable(partial(sum_over_ranks, group=group)))
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            model.set_submodule(path, SyncBatchNorm(layer, total))
    return model


def is_batch_norm(layer: nn.Module) -> bool:
    """Return whether `layer` is any of torch's BatchNorm layers: 1d, 2d, 3d or synchronised."""
    return isinstance(layer, nn.modules.batchnorm._BatchNorm)  # pyright: ignore[reportPrivateUsage], their only common base
