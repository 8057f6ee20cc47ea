"""Tensors as contiguous memory, in which collectives send them: several as one, without gaps."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

CHUNK = 2**16  # elements in each input of torch.cat


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Concatenate the tensors into one, [n], each in the order of `in_memory_order`.

    The tensors are split into chunks first, because torch.cat launches as many thread blocks for
    every input as for the largest: ResNet-18's 62 gradients took 160 us on an H200 without
    splitting and 26 us with it (docs/log/benchmarks.md).
    """
    return torch.cat(
        [chunk for tensor in tensors for chunk in in_memory_order(tensor).flatten().split(CHUNK)]
    )


def unflatten(flattened: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Undo `flatten` without a copy.

    Args:
        flattened: [n].
        like: tensors whose shapes and strides to restore, n elements in all.

    Returns:
        One view of `flattened` for each tensor of `like`.
    """
    parts = flattened.split([tensor.numel() for tensor in like])
    views: list[torch.Tensor] = []
    for part, tensor in zip(parts, like, strict=True):
        order = memory_order(tensor)
        view = part.view_as(tensor.permute(order))
        place_of_dim = sorted(range(len(order)), key=order.__getitem__)
        views.append(view.permute(place_of_dim))
    return views


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the dimensions in `memory_order`, so that flattening it copies nothing.

    It is contiguous if the elements lie side by side: of tensors that are contiguous, channels last
    or transposed.
    """
    return tensor if tensor.is_contiguous() else tensor.permute(memory_order(tensor))


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions from the largest steps in memory to the smallest ones."""
    dims = range(tensor.dim())
    return [*dims] if tensor.is_contiguous() else sorted(dims, key=lambda dim: -tensor.stride(dim))


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Give a tensor the values of the first rank of a group, in place. Collective.

    torch sends contiguous memory only. Of a tensor with gaps, for example every second column of a
    larger one, a copy is sent.
    """
    view = in_memory_order(tensor)
    sent = view.contiguous()
    dist.broadcast(sent, group=group, group_src=0)
    if sent is not view:
        view.copy_(sent)
