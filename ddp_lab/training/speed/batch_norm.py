"""BatchNorm whose mean and variance are two plain sums, for compiled steps.

torch.compile computes the variance of an nn.BatchNorm2d by Welford's algorithm, which divides once per element: those kernels
wait for arithmetic and not for memory. With plain sums a step of ResNet-18 takes 2 % less time (docs/benchmarks-log.md).
"""

import torch
from torch import nn

from ddp_lab.strategies.batch_norm import WrittenBatchNorm


class ShiftedBatchNorm(WrittenBatchNorm):
    """A BatchNorm2d that computes its variance as E[(x - k)^2] - E[x - k]^2 when compiled; in eager mode it is torch's.

    With k = 0 the difference would cancel where the mean is large against the deviation. Here k is one of the channel's pixels
    (Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance", "shifted data").
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise [b, channels, height, width]."""
        count = input.numel() // input.size(1)
        if not self.training or not torch.compiler.is_compiling() or count == 1:  # torch raises an error for one pixel
            return super().forward(input)
        assert self.running_mean is not None
        wide = input.to(self.running_mean.dtype)
        k = wide[:1, :, :1, :1].detach()  # its gradient is zero: the result does not depend on it
        shifted = wide - k
        mean = shifted.mean((0, 2, 3))
        variance = (shifted.square().mean((0, 2, 3)) - mean.square()).clamp_min(0)
        self._update_running_statistics(mean + k.flatten(), variance * (count / (count - 1)))
        scale = self.weight * (variance + self.eps).rsqrt()
        return (shifted * scale.view(-1, 1, 1) + (self.bias - mean * scale).view(-1, 1, 1)).to(input.dtype)


def shift_batch_norms(model: nn.Module) -> None:
    """Replace the BatchNorm layers of `model` by faster ones. Parameters and buffers keep their names and their order."""
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.BatchNorm2d and can_be_shifted(layer):
            model.set_submodule(path, ShiftedBatchNorm(layer))


def can_be_shifted(layer: nn.BatchNorm2d) -> bool:
    """Return whether `WrittenBatchNorm` supports `layer`, which must not be sharded (`can_be_rewritten` says why)."""
    tracks = layer.track_running_stats and layer.momentum is not None
    return layer.affine and tracks and not hasattr(layer.weight, "to_local")
