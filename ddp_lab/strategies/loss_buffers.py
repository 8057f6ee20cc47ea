"""The buffers of a loss that replicas compute from their own samples, such as a running mean."""

from typing import Any, cast

import torch
import torch.distributed as dist

from ddp_lab.models.buffers import set_buffer
from ddp_lab.strategies.contiguous import broadcast
from ddp_lab.tasks.base import Task

Form = tuple[str, torch.Size, torch.dtype]  # of a buffer: name, shape, dtype


def broadcast_loss(task: Task, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Give the buffers of a loss the values that they have on the first rank of a group.

    Collective. Buffers that grow may have another shape on each rank, so the shapes are sent first.

    Args:
        task: with the loss.
        device: of its buffers.
        group: None: all ranks.
    """
    present = dict(task.named_buffers())
    forms: list[Form] = [(name, buffer.shape, buffer.dtype) for name, buffer in present.items()]
    sent: list[Any] = [forms]
    first = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(sent, src=first, group=group, device=device)
    for name, shape, dtype in cast("list[Form]", sent[0]):
        buffer = present.get(name)
        if buffer is None or buffer.shape != shape or buffer.dtype != dtype:
            buffer = torch.empty(shape, dtype=dtype, device=device)
        broadcast(buffer, group)
        if buffer is not present.get(name):
            set_buffer(task, name, buffer)
