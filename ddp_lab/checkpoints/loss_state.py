"""The buffers of a loss that training changes, such as a running mean, in a checkpoint.

The other buffers are constants, such as weights of classes, which the config of a launch has.
"""

from collections.abc import Callable, Mapping

import torch

from ddp_lab.models.buffers import set_buffer
from ddp_lab.observe.log import log
from ddp_lab.tasks.base import Task

PREFIX = "task."  # before the name of a buffer, in the keys of a checkpoint


class LossState:
    """The buffers of a loss, compared with those that it was constructed with.

    Args:
        task: with the loss, before it has trained.
    """

    def __init__(self, task: Task):
        self._task = task
        self._first = {name: buffer.clone() for name, buffer in buffers_of(task).items()}

    def changed(self) -> dict[str, torch.Tensor]:
        """Return the buffers that have changed, by key of a checkpoint. Nothing is copied."""
        return {
            f"{PREFIX}{name}": buffer
            for name, buffer in buffers_of(self._task).items()
            if name not in self._first or not torch.equal(buffer, self._first[name])
        }


def buffers_of(task: Task) -> dict[str, torch.Tensor]:
    """Return the buffers of a loss that its own `state_dict` has, by name."""
    state = task.state_dict()
    return {name: state[name] for name, _ in task.named_buffers() if name in state}


def load_loss(
    task: Task,
    device: torch.device,
    read: Callable[[dict[str, torch.Tensor]], None],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Read the buffers of a loss that are in a checkpoint.

    A buffer may have had no value or another shape when the loss was constructed.

    Args:
        task: with the loss.
        device: of its buffers.
        read: reads tensors by key, in place.
        tensors: of the checkpoint by key, perhaps without data.
    """
    modules = dict(task.named_modules())
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        path, _, attribute = name.rpartition(".")
        if not key.startswith(PREFIX):
            continue
        if path not in modules or not hasattr(modules[path], attribute):
            log.info(f"the loss has no buffer {name}, as the checkpoint has")
            continue
        buffer = torch.empty_like(tensor, device=device)
        read({key: buffer})
        set_buffer(task, name, buffer)
