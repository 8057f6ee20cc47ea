"""Hooks on the units of a sharded model, for their order and for parameters that steps do not use.

A unit's gradients are summed over the ranks in one collective, whose size must be the same on all
of them. A rank that has not used a parameter of the unit therefore contributes zeros. If no rank
has used it, its gradient must be None as on one device, because an optimizer then skips the
parameter; with zeros its momentum and weight decay would change it. That is known from the number
of ranks that have used each parameter, which is summed after every step:

    rank 0   used a, not b   gradients a0, zeros   counts 1 0   a: 2 ranks, their gradients' sum
    rank 1   used a, not b   gradients a1, zeros   counts 1 0   b: no rank, None

Only a rank that has left out a parameter reads the counts, which waits for the device.

Both happen where torch sums the gradients of a unit, wherever it finds that: after its inputs'
gradients, whatever object contains them, or at the end of the backward pass.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from ddp_lab.config.errors import TrainingError
from ddp_lab.strategies.unit_groups import before_sum
from ddp_lab.strategies.unit_order import BACKWARD, END, SUM, WHOLE, UnitOrder


class UnitHooks:
    """Hooks before and after those of fully_shard.

    Args:
        model: the complete model, before it is sharded.
        order: of its units, over the ranks.

    Attributes:
        is_last: whether the backward pass communicates; False in all gradient-accumulation steps
            but the last.
        has_samples: whether the forward pass has a sample that counts; one of padding alone uses no
            parameter.
    """

    def __init__(self, model: nn.Module, order: UnitOrder):
        self.model, self.order = model, order
        self.is_last, self.has_samples = True, True
        self._names = {module: name or WHOLE for name, module in model.named_modules()}
        # fully_shard replaces a parameter, but not the place where its module keeps it.
        self._places: list[tuple[nn.Module, str]] = []
        self._originals: dict[nn.Parameter, int] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and parameter not in self._originals:
                    self._originals[parameter] = len(self._places)
                    self._places.append((module, name))
        self._empty = {index for parameter, index in self._originals.items() if not parameter.numel()}
        self._own: dict[nn.Module, list[int]] = {}  # the parameters that are gathered with a unit
        self._gathered: dict[nn.Module, list[tuple[int, nn.Parameter]]] = {}  # in this step
        self._used = set[int]()  # in this step
        self._in_forward, self._in_backward = False, False
        self._decided: dict[tuple[int, ...], list[int]] = {}
        self._is_captured = False

    def before_sharding(self, unit: nn.Module) -> None:
        """Prepare a unit, after those within it, and before fully_shard is applied to it."""
        originals = self._originals
        self._own[unit] = [originals[found] for found in unit.parameters() if found in originals]
        unit.register_forward_hook(eager(self._leave))

    def after_sharding(self, unit: nn.Module) -> None:
        """Register the hooks around those of fully_shard which gather the unit and sum its gradients."""
        unit.register_forward_pre_hook(eager(self._enter), prepend=True, with_kwargs=True)
        unit.register_forward_pre_hook(eager(self._note_gathered))
        before_sum(unit, partial(self._complete, unit))

    def _enter(self, unit: nn.Module, inputs: Any, named_inputs: Any) -> None:
        if unit is self.model:
            self._in_forward, self._in_backward = True, False
            self.order.begin((unit.training, torch.is_grad_enabled(), self.is_last))
        if self._in_forward:  # a checkpointed block is called again in the backward pass
            if not any(True for _ in tensors_with_gradient((inputs, named_inputs))):
                self.order.without_gradient.add(self._names[unit])
            self.order.event(self._names[unit])

    def _note_gathered(self, unit: nn.Module, inputs: Any) -> None:
        """Remember the gathered parameters, to complete their gradients before torch sums them.

        A reentrant checkpoint calls the unit without gradients first, and with them only in the
        backward pass.
        """
        if torch.is_grad_enabled():
            own = self._own[unit]
            self._gathered[unit] = [(index, getattr(*self._places[index])) for index in own]

    def _leave(self, unit: nn.Module, inputs: Any, outputs: Any) -> None:
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
            # Callbacks run in the order in which they are queued, and fully_shard queues its own later.
            Variable._execution_engine.queue_callback(self._end_backward)  # pyright: ignore
        self.order.event(BACKWARD + self._names[unit])

    def _end_backward(self) -> None:
        """Note the end, behind which fully_shard sums the units whose inputs need no gradient."""
        self._in_backward = False
        self.order.event(END)

    def _complete(self, unit: nn.Module) -> None:
        """Set the missing gradients of a unit to zeros, just before torch sums them."""
        if self._in_backward:
            self.order.event(SUM + self._names[unit])
        for index, parameter in self._gathered.get(unit, []):
            if parameter.grad is not None:
                self._used.update([index] if self.has_samples else [])
            elif self.is_last:
                parameter.grad = torch.zeros_like(parameter)
            if index in self._empty:
                parameter.grad = None  # torch cannot sum it

    def drop_unused(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Set the gradients of parameters that no rank has used in this step to None. Collective.

        Raises:
            TrainingError: a step that is captured in a CUDA graph, or that follows, leaves out other
                parameters than those before.
        """
        places = range(len(self._places))
        unused = tuple(index for index in places if index not in self._used)
        unused_everywhere = list(unused)
        if self.order.is_active:
            unused_everywhere = self._unused_everywhere(unused, group, device)
        for index in unused_everywhere:
            self._sharded(index).grad = None
        for index in self._empty.difference(unused_everywhere):
            self._sharded(index).grad = torch.zeros_like(self._sharded(index))
        self._used.clear()
        self._gathered.clear()

    def _sharded(self, index: int) -> nn.Parameter:
        """Return a parameter while no unit is gathered."""
        return getattr(*self._places[index])

    def _unused_everywhere(self, unused: tuple[int, ...], group: dist.ProcessGroup, device: torch.device) -> list[int]:
        """Return which of the parameters that this rank has not used no other rank has used."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._is_captured = self._is_captured or capturing
        # A captured step reads nothing. A rank may compute one of the next steps without its graph,
        # to inject a fault: the collectives must remain those of the others, which replay theirs.
        if self._is_captured:
            if unused and unused not in self._decided:
                raise TrainingError(
                    "cuda_graph=true: a step leaves out other parameters than those before its capture. Use cuda_graph=false"
                )
            return self._decided.get(unused, [])
        counts = torch.ones(len(self._places), device=device)
        if unused:
            counts.index_fill_(0, torch.tensor(unused, device=device), 0)
        dist.all_reduce(counts, group=group)
        if not unused:
            return []
        ranks = counts.tolist()
        self._decided[unused] = [index for index in unused if ranks[index] == 0]
        return self._decided[unused]


def eager(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that torch.compile does not trace."""
    return cast("Callable[..., Any]", torch.compiler.disable(hook))


def tensors_with_gradient(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that the backward pass computes a gradient of, where fully_shard finds them.

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
