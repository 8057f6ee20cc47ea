"""The state of models and losses, which a trial leaves as it was: values, attributes, generators.

A trial calls code of the user. What that code counts or remembers would otherwise differ between
strategies, of which some make a trial and others do not.
"""

import argparse
import operator
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

# Packages whose objects, apart from modules and NAMESPACES, should keep no state of a pass.
UNCHANGED = {"builtins", "ddp_lab", "numpy", "torch", *sys.stdlib_module_names}
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
MOST = 200_000  # objects; a model may refer to a dataset


@contextmanager
def state_kept(*roots: object, weights: bool = True) -> Generator[None]:
    """Restore at the end what the body changes in models, losses and random generators.

    It follows attributes, containers, bound methods and the variables of closures. It does not
    follow global variables and the class of an object.

    Args:
        roots: models, losses and functions that the body calls.
        weights: whether the values of parameters are restored, too, which takes a copy of them.
    """
    with random_state_kept():
        snapshot = Snapshot(weights)
        for root in roots:
            snapshot.add(root)
        try:
            yield
        finally:
            snapshot.restore()


@contextmanager
def random_state_kept() -> Generator[None]:
    """Restore the global generators of torch, its current GPU, Python and NumPy at the end."""
    python = random.getstate()
    of_numpy = np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(of_numpy)


class Snapshot:
    """The state of objects, which is restored in place.

    Args:
        weights: whether the values of parameters belong to it.
    """

    def __init__(self, weights: bool):
        self.weights = weights
        self._seen: dict[int, object] = {}  # the objects, so that no other one gets the same id
        self._restores: list[Callable[[], object]] = []

    def add(self, root: object) -> None:
        """Note the state of an object and of all that it refers to."""
        left = [root]
        while left and len(self._seen) < MOST:
            each = left.pop()
            if id(each) in self._seen:
                continue
            self._seen[id(each)] = each
            left.extend(self._note(each))

    def restore(self) -> None:
        """Restore the state of all objects."""
        for restore in self._restores:
            restore()

    def _note(self, each: Any) -> list[Any]:
        """Note the state of an object, and return what it refers to."""
        if isinstance(each, torch.Tensor):
            self._note_tensor(each)
            return []
        if isinstance(each, dict):
            return self._note_dict(cast("dict[Any, Any]", each))
        if isinstance(each, (list, deque, set)):
            return self._note_items(cast("Any", each))

        if isinstance(each, torch.Generator):
            self._restores.append(partial(each.set_state, each.get_state()))
            return []
        if isinstance(each, random.Random):
            self._restores.append(partial(each.setstate, each.getstate()))
            return []

        if isinstance(each, np.random.Generator):
            bits = each.bit_generator
            self._restores.append(partial(setattr, bits, "state", bits.state))
            return []
        if isinstance(each, types.FunctionType):
            cells = [cell for cell in each.__closure__ or () if is_filled(cell)]
            return [*map(self._note_cell, cells), *(each.__defaults__ or ()), vars(each)]

        if isinstance(each, types.MethodType):
            return [each.__self__, each.__func__]
        if isinstance(each, partial):
            wrapped: partial[Any] = each
            return [wrapped.func, *wrapped.args, *wrapped.keywords.values()]
        if isinstance(each, tuple):
            return [*cast("tuple[Any, ...]", each)]
        return self._note_slots(each) + attributes_of(each)

    def _note_tensor(self, tensor: torch.Tensor) -> None:
        if is_lazy(tensor) or tensor.layout is not torch.strided:
            return
        data = tensor.data
        is_read = self.weights or not isinstance(tensor, nn.Parameter)
        values = data.clone() if is_read and not tensor.is_meta else None
        gradient = tensor.grad if tensor.is_leaf else None
        trained = tensor.requires_grad

        def restore() -> None:
            if values is not None:
                data.copy_(values)
            if tensor.is_leaf:
                if not shares_memory(tensor, data):
                    tensor.data = data
                if tensor.requires_grad != trained:
                    tensor.requires_grad_(trained)
                tensor.grad = gradient

        self._restores.append(restore)

    def _note_dict(self, each: dict[Any, Any]) -> list[Any]:
        items = dict(each)
        kind: Any = OrderedDict if isinstance(each, OrderedDict) else dict

        def restore() -> None:
            same_keys = list(each) == list(items)
            if not same_keys or any(each[key] is not value for key, value in items.items()):
                kind.clear(each)
                kind.update(each, items)

        self._restores.append(restore)
        return [*items.values()]

    def _note_items(self, each: Any) -> list[Any]:
        items = [*each]

        def restore() -> None:
            same_length = len(each) == len(items)
            if not same_length or any(map(operator.is_not, each, items)):
                each.clear()
                (each.update if isinstance(each, set) else each.extend)(items)

        self._restores.append(restore)
        return items

    def _note_cell(self, cell: types.CellType) -> Any:
        contents = cell.cell_contents
        self._restores.append(partial(setattr, cell, "cell_contents", contents))
        return contents

    def _note_slots(self, each: Any) -> list[Any]:
        values: list[Any] = []
        if not is_followed(each):
            return values
        for kind in type(each).__mro__:
            names = kind.__dict__.get("__slots__", ())
            for name in [names] if isinstance(names, str) else names:
                with suppress(AttributeError):  # without a value
                    value = getattr(each, name)
                    self._restores.append(partial(restore_slot, each, name, value))
                    values.append(value)
        return values


def shares_memory(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same memory, or on the meta device would have it."""
    places = [tensor.untyped_storage()._cdata for tensor in (first, other)]  # pyright: ignore
    return places[0] == places[1]


def restore_slot(each: object, name: str, value: object) -> None:
    """Set an attribute again that has a slot."""
    with suppress(AttributeError, TypeError):  # of a frozen class
        setattr(each, name, value)


def is_filled(cell: types.CellType) -> bool:
    """Return whether the variable of a closure has a value yet."""
    with suppress(ValueError):
        _ = cell.cell_contents
        return True
    return False


def is_followed(each: object) -> bool:
    """Return whether an object may keep a state: a module, or one of a class of the user's."""
    if isinstance(each, (type, types.ModuleType)):
        return False
    package = type(each).__module__.partition(".")[0]
    return isinstance(each, (nn.Module, *NAMESPACES)) or package not in UNCHANGED


def attributes_of(each: object) -> list[Any]:
    """Return the dict of an object's attributes, in a list; [] if it has or needs none."""
    return [vars(each)] if is_followed(each) and hasattr(each, "__dict__") else []
