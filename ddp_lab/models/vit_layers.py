"""Layers of torch in the form in which a Vision Transformer computes them fastest."""

import torch
import torch.nn.functional as F
from torch import nn


class Patches(nn.Conv2d):
    """The convolution of patches that do not overlap, as one matrix multiplication with the pixels of every patch.

    cuDNN's outputs would be transposed tokens, and the gradient of its weight took a tenth of ViT-S/16's compiled step (H200).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return [b, width, rows, columns], channels last, for images [b, c, height, width]."""
        size = self.weight.shape[-1]
        pixels = input.unflatten(2, (-1, size)).unflatten(4, (-1, size))  # [b, c, rows, size, columns, size]
        pixels, weight = pixels.permute(0, 2, 4, 1, 3, 5), self.weight
        if weight.stride(1) == 1:  # channels last: its gradient must get the same strides, for DDP's buckets
            pixels, weight = pixels.permute(0, 1, 2, 4, 5, 3), weight.permute(0, 2, 3, 1)
        return F.linear(pixels.flatten(3), weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class Norm(nn.LayerNorm):
    """A layer normalization whose outputs have the dtype of the inputs.

    Under autocast it computes in float32, and each layer after it would round the outputs for itself.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).to(input.dtype)
