"""Convolutions whose channels are no multiples of 8, written so that torch.compile can fuse what a GPU's tensor cores need.

cuDNN pads such channels itself, in kernels of their own, before and behind each of a convolution's three products (outputs,
gradient of the inputs, gradient of the weight); an image of one channel becomes eight times as large. LeNet's compiled step
took about a quarter longer for it (docs/benchmarks-log.md). Padding that is written out can be fused with what is around it.
"""

import torch
import torch.nn.functional as F
from torch import nn


class PaddedConv2d(nn.Conv2d):
    """A convolution that pads its channels to multiples of 8 where it is compiled; elsewhere it is an nn.Conv2d.

    Args:
        conv: the layer that it takes the place of, and whose parameters it shares.
    """

    def __init__(self, conv: nn.Conv2d):
        shape = (conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, conv.dilation)
        super().__init__(*shape, bias=conv.bias is not None, device="meta")  # meta: draws no random numbers
        self.weight, self.bias = conv.weight, conv.bias
        self.train(conv.training)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():  # evaluation, batches of another size: nothing would fuse the padding
            return super().forward(inputs)
        if self.in_channels == 1 and self.stride == self.dilation == (1, 1):
            return as_product(inputs, self.weight, self.bias, self.padding)
        weight, bias = pad_to_eights(self.weight, 0, 1), None if self.bias is None else pad_to_eights(self.bias, 0)
        outputs = F.conv2d(pad_to_eights(inputs, 1), weight, bias, self.stride, self.padding, self.dilation)
        return outputs[:, : self.out_channels]


def pad_convolutions(model: nn.Module) -> None:
    """Replace, in `model`, the convolutions that padding speeds up. Parameters, their names and their order stay."""
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Conv2d and (layer.in_channels % 8 or layer.out_channels % 8) and can_be_rewritten(layer):
            model.set_submodule(path, PaddedConv2d(layer))


def can_be_rewritten(conv: nn.Conv2d) -> bool:
    return conv.groups == 1 and conv.padding_mode == "zeros" and isinstance(conv.padding, tuple)


def as_product(images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: tuple[int, int]) -> torch.Tensor:
    """A convolution as one product of matrices: a row for what each output pixel sees (im2col; Chellapilla et al. 2006, "High
    performance convolutional neural networks for document processing").

    Args:
        images: [n, 1, height, width].
        weight: [o, 1, rows, columns].

    Returns:
        [n, o, h, w], channels last.
    """
    (rows, columns), (top, left) = weight.shape[2:], padding
    images = F.pad(images, (left, left, top, top))[:, 0]
    seen = images.unfold(1, rows, 1).unfold(2, columns, 1).flatten(3)
    n, h, w, _ = seen.shape
    if weight.stride(1) == 1:  # channels last: so its gradient gets the same strides, which DDP's buckets want
        weight = weight.permute(0, 2, 3, 1)
    matrix = pad_to_eights(weight.flatten(1), 0, 1)
    outputs = F.linear(pad_to_eights(seen, 3).flatten(0, 2), matrix, None if bias is None else pad_to_eights(bias, 0))
    return outputs.view(n, h, w, len(matrix))[..., : len(weight)].permute(0, 3, 1, 2)


def pad_to_eights(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
    """Zeros behind what is there, so that the sizes of these dimensions are multiples of 8."""
    amounts = [0] * 2 * tensor.dim()  # as F.pad wants them: before and behind, the last dimension first
    for dim in dims:
        amounts[-2 * dim - 1] = -tensor.shape[dim] % 8
    return F.pad(tensor, amounts)
