"""Gradients of a sharded model's parameters that steps do not use, completed where torch sums them.

A unit's gradients are summed over the ranks in one collective, whose size must be the same on all
of them. A rank that has not used a parameter of the unit therefore contributes zeros. If no rank
has used it, its gradient must be None as on one device, because an optimizer then skips the
parameter; with zeros its momentum and weight decay would change it. That is known from the number
of ranks that have used each parameter, which is summed after every step:

    rank 0   used a, not b   gradients a0, zeros   counts 1 0   a: 2 ranks, their gradients' sum
    rank 1   used a, not b   gradients a1, zeros   counts 1 0   b: no rank, None

Only a rank that has left out a parameter reads the counts, which waits for the device.

Zeros are set where torch sums the gradients of a unit, wherever it finds that: after its inputs'
gradients, whatever object contains them, or at the end of the backward pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.config.errors import TrainingError
from ddp_lab.strategies.unit_groups import before_sum, groups_of


class UnitGradients:
    """Gradients of the units of a model.

    Args:
        model: before it is sharded.
        is_divided: whether several ranks share the sums.

    Attributes:
        has_samples: whether the forward pass has a sample that counts; one of padding alone uses no
            parameter.
    """

    def __init__(self, model: nn.Module, is_divided: bool):
        self.is_divided = is_divided
        self.has_samples = True
        # fully_shard replaces a parameter, but not the place where its module keeps it.
        self._places: list[tuple[nn.Module, str]] = []
        self._originals: dict[nn.Parameter, int] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and parameter not in self._originals:
                    self._originals[parameter] = len(self._places)
                    self._places.append((module, name))

        self._empty = {
            index for parameter, index in self._originals.items() if not parameter.numel()
        }
        # the parameters that are gathered with a unit
        self._gathered_with: dict[nn.Module, list[int]] = {}
        self._gathered: dict[nn.Module, list[tuple[int, nn.Parameter]]] = {}  # in this step
        self._used = set[int]()  # in this step
        self._decided: dict[tuple[int, ...], list[int]] = {}
        self._is_captured = False

    def before_sharding(self, unit: nn.Module) -> None:
        """Prepare a unit, after those within it, and before fully_shard is applied to it."""
        originals = self._originals
        self._gathered_with[unit] = [
            originals[parameter] for parameter in unit.parameters() if parameter in originals
        ]

    def after_sharding(self, unit: nn.Module) -> None:
        """Register hooks around those of fully_shard that gather the unit and sum its gradients."""
        unit.register_forward_pre_hook(eager(self._note_gathered))
        before_sum(unit, partial(self.complete, unit))

    def _note_gathered(self, unit: nn.Module, inputs: Any) -> None:
        """Remember the gathered parameters, to complete their gradients before torch sums them.

        A reentrant checkpoint calls the unit without gradients first, and with them only in the
        backward pass.
        """
        if torch.is_grad_enabled():
            parameters = self._gathered_with[unit]
            self._gathered[unit] = [(index, getattr(*self._places[index])) for index in parameters]

    def complete(self, unit: nn.Module) -> None:
        """Set the missing gradients of a unit to zeros, just before torch sums them.

        In all gradient-accumulation steps and micro-batches but the last it does not, and only
        notes which parameters are used.
        """
        is_summed = any(group.reduce_grads for group in groups_of(unit))
        for index, parameter in self._gathered.get(unit, []):
            if parameter.grad is not None:
                self._used.update([index] if self.has_samples else [])
            elif is_summed:
                parameter.grad = torch.zeros_like(parameter)
            if index in self._empty:
                parameter.grad = None  # torch cannot sum it

    def drop_unused(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Set the gradients of parameters that no rank has used in this step to None. Collective.

        Raises:
            TrainingError: a step that is captured in a CUDA graph, or that follows, leaves out
                other parameters than those before.
        """
        places = range(len(self._places))
        unused = tuple(index for index in places if index not in self._used)
        unused_everywhere = list(unused)
        if self.is_divided:
            unused_everywhere = self._unused_everywhere(unused, group, device)
        for index in unused_everywhere:
            self._sharded(index).grad = None
        for index in self._empty.difference(unused_everywhere):
            self._sharded(index).grad = torch.zeros_like(self._sharded(index))
        self.forget_step()

    def forget_step(self) -> None:
        """Forget which parameters the passes since the last step have used."""
        self._used.clear()
        self._gathered.clear()

    def _sharded(self, index: int) -> nn.Parameter:
        """Return a parameter while no unit is gathered."""
        return getattr(*self._places[index])

    def _unused_everywhere(
        self, unused: tuple[int, ...], group: dist.ProcessGroup, device: torch.device
    ) -> list[int]:
        """Return which of the parameters that this rank has not used no other rank has used."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._is_captured = self._is_captured or capturing
        # A captured step reads nothing. A rank may compute one of the next steps without its graph,
        # to inject a fault: the collectives must remain those of the others, which replay theirs.
        if self._is_captured:
            if unused and unused not in self._decided:
                raise TrainingError(
                    "cuda_graph=true: a step leaves out other parameters than those before its "
                    "capture. Use cuda_graph=false"
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
