"""Hooks on the units of a sharded model, for the order in which the ranks use them.

Each use of a unit, each backward pass of it and each sum of its gradients is a collective, of which
UnitOrder lets the ranks agree before it begins.
"""

import dataclasses
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from ddp_lab.strategies.unit_gradients import UnitGradients, eager
from ddp_lab.strategies.unit_groups import gather_before_backward
from ddp_lab.strategies.unit_order import BACKWARD, END, SUM, WHOLE, UnitOrder


class UnitHooks(UnitGradients):
    """Hooks before and after those of fully_shard.

    Args:
        model: the complete model, before it is sharded.
        order: of its units, over the ranks.

    Attributes:
        is_last: whether the backward pass communicates; False in all gradient-accumulation steps
            but the last.
    """

    def __init__(self, model: nn.Module, order: UnitOrder):
        super().__init__(model, order.is_active)
        self.model = model
        self.order = order
        self.is_last = True
        self._names = {module: name or WHOLE for name, module in model.named_modules()}
        self._in_forward = False
        self._in_backward = False

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Let the backward passes of the body not communicate."""
        self.is_last = False
        try:
            yield
        finally:
            self.is_last = True

    def before_sharding(self, unit: nn.Module) -> None:
        super().before_sharding(unit)
        unit.register_forward_hook(eager(self._leave))

    def after_sharding(self, unit: nn.Module) -> None:
        unit.register_forward_pre_hook(eager(self._enter), prepend=True, with_kwargs=True)
        super().after_sharding(unit)

    def _enter(self, unit: nn.Module, inputs: Any, named_inputs: Any) -> None:
        if unit is self.model:
            self._in_forward = True
            self._in_backward = False
            self.order.begin((unit.training, torch.is_grad_enabled(), self.is_last))
        if self._in_forward:  # a checkpointed block is called again in the backward pass
            if not any(True for _ in tensors_with_gradient((inputs, named_inputs))):
                self.order.without_gradient.add(self._names[unit])
            self.order.event(self._names[unit])

    def _leave(self, unit: nn.Module, inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            gather_before_backward(unit, tensors_in_objects(outputs))
        if not self._in_forward:
            return
        if unit is self.model:
            self._in_forward = False
            self.order.event(END)
        seen = list[bool]()
        if torch.is_grad_enabled():
            for tensor in tensors_with_gradient(outputs):
                tensor.register_hook(lambda _: self._begin_backward(unit, seen))

    def _begin_backward(self, unit: nn.Module, seen: list[bool]) -> None:
        """Prepare the backward pass of a unit, when it arrives at the first of its outputs."""
        if seen:
            return
        seen.append(True)
        if not self._in_backward:
            self._in_backward = True
            # Callbacks run in the order in which they are queued, and fully_shard queues its own
            # later.
            Variable._execution_engine.queue_callback(self._end_backward)  # pyright: ignore
        self.order.event(BACKWARD + self._names[unit])

    def _end_backward(self) -> None:
        """Note the end, after which fully_shard sums the units whose inputs need no gradient."""
        self._in_backward = False
        self.order.event(END)

    def complete(self, unit: nn.Module) -> None:
        if self._in_backward:
            self.order.event(SUM + self._names[unit])
        super().complete(unit)


def tensors_in_objects(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in objects that the backward pass computes a gradient of.

    fully_shard finds none of them before torch 2.12, and later those in dataclasses.

    Args:
        values: nested containers and objects, of which none contains itself.
    """
    for value in tree_leaves(values):
        if not isinstance(value, (torch.Tensor, type)) and hasattr(value, "__dict__"):
            attributes = [*vars(value).values()]
            yield from (
                each
                for each in tree_leaves(attributes)
                if isinstance(each, torch.Tensor) and each.requires_grad
            )
            yield from tensors_in_objects(attributes)


def tensors_with_gradient(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors whose gradients the backward pass computes, where fully_shard finds them.

    Args:
        values: nested containers and dataclasses.
    """
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                yield value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.fields(value)
            yield from tensors_with_gradient([getattr(value, field.name) for field in fields])
