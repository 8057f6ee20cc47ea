"""The channels-last memory format, in which convolutions are faster on GPUs."""

import torch
from torch import nn


def to_channels_last(model: nn.Module) -> nn.Module:
    """Set the memory format of a model and return it. Called before `Strategy.setup`.

    Images of one channel are contiguous and channels last at once; only their strides tell which is
    meant. With those of a contiguous tensor either the outputs of ResNet-18's first convolution
    were contiguous, which took 6 % of a step, or the gradient of its weight was, which DDP copies
    and warns about (H100, torch 2.11, 2026-11-25).
    """
    for layer in model.modules():
        # a subclass may have other arguments
        if type(layer) is nn.Conv2d and layer.in_channels == 1:
            layer.register_forward_pre_hook(inputs_to_channels_last)
    return model.to(memory_format=torch.channels_last)


def inputs_to_channels_last(
    layer: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a convolution with the strides of channels last.

    `Tensor.contiguous` would not set them.
    """
    return tuple(
        images.to(memory_format=torch.channels_last) if images.dim() == 4 else images
        for images in inputs
    )
