"""The buffers of a model or a loss, by name."""

from collections.abc import Mapping

import torch
from torch import nn


def state_of(root: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the buffers of a module by name, with None for those that have no value yet.

    Of the latter only those that its `state_dict` would have: others are tables that a pass makes.
    """
    buffers: dict[str, torch.Tensor | None] = dict(root.named_buffers())
    for path, module in root.named_modules():
        for name, buffer in module._buffers.items():  # pyright: ignore[reportPrivateUsage]
            is_saved = name not in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
            if buffer is None and is_saved:
                buffers[f"{path}.{name}" if path else name] = None
    return buffers


def replace_buffer(root: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    """Let a module have a tensor as its buffer in place of the present one.

    Args:
        root: model or loss.
        name: of the buffer, which may have no value yet.
        tensor: of any shape; None: the buffer has no value any more.
    """
    path, _, attribute = name.rpartition(".")
    setattr(root.get_submodule(path), attribute, tensor)


def replace_buffer_of(
    roots: Mapping[str, nn.Module], name: str, tensor: torch.Tensor | None
) -> None:
    """Replace a buffer of one of several modules, as `replace_buffer`.

    Args:
        roots: by name.
        name: of one of them, a dot, and the name of its buffer.
        tensor: as for `replace_buffer`.
    """
    root, _, name_in_root = name.partition(".")
    replace_buffer(roots[root], name_in_root, tensor)


def set_buffer(root: nn.Module, name: str, value: torch.Tensor) -> None:
    """Give a buffer a value: in place if shape and dtype are equal, else it is another tensor.

    Args:
        root: model or loss.
        name: of the buffer, which may have no value yet.
        value: of it; a new tensor is on the same device.
    """
    buffer = dict(root.named_buffers()).get(name)
    if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
        replace_buffer(root, name, value.clone())
    else:
        buffer.copy_(value)


def copy_buffers(source: nn.Module, target: nn.Module, device: torch.device) -> None:
    """Give a copy of a module the values of the buffers of the original.

    Args:
        source, target: equal modules.
        device: of `target`.
    """
    for name, buffer in source.named_buffers():
        set_buffer(target, name, buffer.to(device))
