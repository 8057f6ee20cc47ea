"""What makes convolutions fast on GPUs: channels padded to multiples of 8.

channels_last.py has the memory format.

Tensor cores need such multiples. Without explicit padding, cuDNN pads in separate kernels, before
and after each of a convolution's three matrix multiplications (outputs, gradient of the inputs,
gradient of the weight). Images of one channel become eight times as large. With that padding
LeNet's compiled step took about a quarter longer (docs/log/benchmarks.md). torch.compile fuses
explicit padding with the neighbouring kernels.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn


class PaddedConv2d(nn.Conv2d):
    """A convolution that pads its channels to multiples of 8 when compiled; else an nn.Conv2d.

    Only for convolutions for which `can_be_rewritten` returns True.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # eager mode (evaluation, other batch sizes) cannot fuse the padding
        if not torch.compiler.is_compiling():
            return super().forward(input)
        if self.in_channels == 1 and self.stride == self.dilation == (1, 1):
            return as_product(input, self.weight, self.bias, cast("tuple[int, int]", self.padding))
        weight = pad_to_eights(self.weight, 0, 1)
        bias = None if self.bias is None else pad_to_eights(self.bias, 0)
        outputs = F.conv2d(
            pad_to_eights(input, 1), weight, bias, self.stride, self.padding, self.dilation
        )
        return outputs[:, : self.out_channels]


def pad_convolutions(model: nn.Module) -> None:
    """Make PaddedConv2ds of the convolutions of `model` that padding makes faster, in place."""
    for layer in model.modules():
        if (
            type(layer) is nn.Conv2d
            and (layer.in_channels % 8 or layer.out_channels % 8)
            and can_be_rewritten(layer)
        ):
            # only the class: a stage's container, a list or a hook may refer to the layer
            layer.__class__ = PaddedConv2d


def can_be_rewritten(conv: nn.Conv2d) -> bool:
    """Return whether PaddedConv2d supports `conv`: groups=1, zeros as padding, by numbers.

    Shards are not supported, because fully_shard gathers them into the module that it was applied
    to.
    """
    sharded = hasattr(conv.weight, "to_local")
    return (
        conv.groups == 1
        and conv.padding_mode == "zeros"
        and isinstance(conv.padding, tuple)
        and not sharded
    )


def as_product(
    images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: tuple[int, int]
) -> torch.Tensor:
    """Compute a convolution as one matrix multiplication of a row per output pixel (im2col).

    The method is that of Chellapilla et al. 2006, "High performance convolutional neural networks
    for document processing".

    Args:
        images: [n, 1, height, width].
        weight: [o, 1, rows, columns].
        bias: [o].
        padding: rows above and below the images, columns to the left and right of them.

    Returns:
        [n, o, h, w], channels last.
    """
    (rows, columns) = weight.shape[2:]
    (top, left) = padding
    images = F.pad(images, (left, left, top, top))[:, 0]
    seen = images.unfold(1, rows, 1).unfold(2, columns, 1).flatten(3)
    n, h, w, _ = seen.shape
    # channels last: its gradient must get the same strides, for DDP's buckets
    if weight.stride(1) == 1:
        weight = weight.permute(0, 2, 3, 1)

    matrix = pad_to_eights(weight.flatten(1), 0, 1)
    outputs = F.linear(
        pad_to_eights(seen, 3).flatten(0, 2),
        matrix,
        None if bias is None else pad_to_eights(bias, 0),
    )
    return outputs.view(n, h, w, len(matrix))[..., : len(weight)].permute(0, 3, 1, 2)


def pad_to_eights(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
    """Append zeros along `dims`, so that their sizes become multiples of 8."""
    # of F.pad: before and after each dimension, the last dimension first
    amounts = [0] * 2 * tensor.dim()
    for dim in dims:
        amounts[-2 * dim - 1] = -tensor.shape[dim] % 8
    return F.pad(tensor, amounts)
