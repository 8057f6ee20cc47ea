"""Whether a model draws random numbers in training, as dropout does."""

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_lab.data.trees import Tree
from ddp_lab.models.calls import call
from ddp_lab.models.kept_state import state_kept
from ddp_lab.models.trial import fake_copy, is_large, meta_copy
from ddp_lab.models.usage import drawn_like


class Draws(TorchDispatchMode):
    """Records whether an operation draws from a random generator.

    Attributes:
        has_drawn: whether one has.
    """

    def __init__(self):
        super().__init__()
        self.has_drawn = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.has_drawn = self.has_drawn or has_dropout(func, args, kwargs or {})
        return func(*args, **kwargs or {})


def has_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return False if an operation that may draw has the probability 0, as attention without it."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return value != 0
    return True


def draws_at_random(model: nn.Module, example: Tree) -> bool:
    """Return whether a forward pass in training draws random numbers; True if that is not known.

    Args:
        model: complete, on any device. It is copied and stays as it is.
        example: two samples, on the meta device; None: they are not known.
    """
    if example is None:
        return True
    # A model that reads values cannot run there.
    with suppress(Exception), state_kept(model, weights=False):
        return _draws(meta_copy(model), example)
    if is_large(model):
        with suppress(Exception), state_kept(model, weights=False), fake_copy(model) as copied:
            return _draws(copied, drawn_like(example))
    if not any(parameter.is_meta for parameter in model.parameters()):
        with suppress(Exception), state_kept(model, weights=False):
            return _draws(copy.deepcopy(model), drawn_like(example))
    return True


def _draws(model: nn.Module, inputs: Tree) -> bool:
    draws = Draws()
    with draws, torch.no_grad():
        call(model.train(), inputs)
    return draws.has_drawn
