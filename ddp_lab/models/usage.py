"""What a forward pass uses of a model: the modules it calls, and where it uses each parameter.

A parameter can be used without the forward pass of the module that has it: `encoder.encode(x)`, or
`F.linear(h, self.embedding.weight)`. A strategy that does something to a module before its forward
pass must know that.
"""

import copy
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddp_lab.data.trees import Tree, apply
from ddp_lab.models.calls import call
from ddp_lab.models.kept_state import state_kept
from ddp_lab.models.trial import fake_copy, is_large, meta_copy


@dataclass(frozen=True)
class Usage:
    """What a forward pass in training mode and one in evaluation mode used.

    The model itself has the name "".

    Attributes:
        called: names of the modules whose `forward` was called.
        within: by the name of a parameter that was used, names of the modules whose `forward` was
            running at all its uses.
        written: by the name of a parameter that a forward pass changed or replaced, the name of the
            innermost module whose `forward` was running then.
        replaced: names of those of them in whose place another parameter is.
    """

    called: frozenset[str]
    within: Mapping[str, frozenset[str]]
    written: Mapping[str, str]
    replaced: frozenset[str]


def find_usage(model: nn.Module, example: Tree) -> Usage | None:
    """Return what two samples use of a model; None if a copy of it cannot run here.

    Args:
        model: the complete model, on the CPU or on the meta device. It is copied and stays as it
            is.
        example: two samples, on the meta device.
    """
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if on_meta or is_large(model):
        # A model that reads values cannot run there.
        with suppress(Exception), state_kept(model, weights=False):
            return record(meta_copy(model), example)
        with suppress(Exception), state_kept(model, weights=False), fake_copy(model) as copied:
            return record(copied, drawn_like(example))
    if not on_meta:
        # A copy shares closures and random states with the model.
        with suppress(Exception), state_kept(model, weights=False):
            return record(copy.deepcopy(model), drawn_like(example))
    return None


def drawn_like(example: Tree) -> Tree:
    """Return samples on the CPU: random numbers from 0 to 1, or zeros if they have no fraction."""

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        on_cpu = torch.zeros_like(tensor, device="cpu")
        return on_cpu.uniform_() if on_cpu.is_floating_point() else on_cpu

    return apply(drawn, example)


def record(model: nn.Module, inputs: Tree) -> Usage:
    """Run the model in both modes, which may change its buffers, and return what it used."""
    recorder = Recorder(model)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            enter = module.register_forward_pre_hook(lambda *_, name=name: recorder.enter(name))
            leave = module.register_forward_hook(lambda *_: recorder.leave(), always_call=True)
            hooks.callback(enter.remove)
            hooks.callback(leave.remove)
        for training in (True, False):
            with recorder, torch.set_grad_enabled(training):
                call(model.train(training), inputs)
                recorder.find_replaced()
    return Usage(
        frozenset(recorder.called),
        recorder.within,
        recorder.written,
        frozenset(recorder.replaced),
    )


class Recorder(TorchDispatchMode):
    """Record which modules run at each operation on a parameter, or on a tensor of its memory.

    Args:
        model: whose parameters are meant.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.called: set[str] = set()
        self.within: dict[str, frozenset[str]] = {}
        self.written: dict[str, str] = {}
        self.replaced: set[str] = set()
        self._model = model
        self._running: list[str] = []
        self._names: dict[int, list[str]] = {}
        self._parameters = dict(model.named_parameters())
        self._memories: list[torch.UntypedStorage] = []  # so that no other one gets an identifier
        for name, parameter in self._parameters.items():
            self._names.setdefault(memory_of(parameter), []).append(name)
            self._memories.append(parameter.untyped_storage())

    def enter(self, name: str) -> None:
        self.called.add(name)
        self._running.append(name)

    def leave(self) -> None:
        self._running.pop()

    def find_replaced(self) -> None:
        """Note the parameters that are others or have other memory, as by `weight.data = ...`."""
        now = dict(self._model.named_parameters())
        for name, parameter in self._parameters.items():
            if now.get(name) is not parameter:
                self.replaced.add(name)
            if name in self.replaced or name not in self._names.get(memory_of(parameter), ()):
                self.written.setdefault(name, name.rpartition(".")[0])

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        running = frozenset(self._running)
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                for name in self._names.get(memory_of(tensor), ()):
                    self.within[name] = self.within.get(name, running) & running
        for tensor in changed_by(func, args, kwargs or {}):
            for name in self._names.get(memory_of(tensor), ()):
                self.written.setdefault(name, self._running[-1] if self._running else "")
        return func(*args, **kwargs or {})


def changed_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation of torch changes in place.

    Args:
        func: the operation.
        args, kwargs: what it is called with.
    """
    if not func._schema.is_mutable:
        return []
    changed: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name))
    return [tensor for tensor in changed if isinstance(tensor, torch.Tensor)]


def memory_of(tensor: torch.Tensor) -> int:
    """Return an identifier of the memory of a tensor, which its views share.

    It exists on the meta device, too; it is 0 without memory.
    """
    try:
        return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    except NotImplementedError:  # a sparse tensor
        return 0
