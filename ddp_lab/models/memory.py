"""Parameters and buffers whose elements share memory, as those of `Tensor.expand`."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ddp_lab.config.errors import ConfigError


def give_own_memory(model: nn.Module, subject: str) -> None:
    """Make the buffers of a model contiguous, in place, so that they can be written into.

    An expanded buffer, for example a mask, has one element in memory for several of its own. torch
    refuses to write into it, as a broadcast, a checkpoint that is loaded and on_nan=skip do. A
    buffer with several names keeps them.

    Args:
        model: with its weights, or on the meta device.
        subject: what the model is, for the message.

    Raises:
        ConfigError: a parameter is expanded, so no optimizer can update it.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_lazy(parameter) and is_expanded(parameter):
            raise ConfigError(
                f"{subject}: the parameter {name} is expanded: several of its elements share one "
                "place in memory, so that no optimizer can update it. Make it by "
                "nn.Parameter(tensor.expand(...).clone())"
            )

    contiguous: dict[int, torch.Tensor] = {}  # by the id of the buffer that it replaces
    replaced: list[torch.Tensor] = []  # kept alive, so that their ids stay their own
    for module in model.modules():
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            if is_lazy(buffer) or has_own_memory(buffer):
                continue
            if id(buffer) not in contiguous:
                contiguous[id(buffer)] = buffer.contiguous()
                replaced.append(buffer)
            setattr(module, name, contiguous[id(buffer)])


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous, in the default or the channels-last format."""
    channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.is_contiguous() or channels_last


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether several elements of a tensor share one place in memory."""
    return any(
        step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
