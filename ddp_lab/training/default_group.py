"""The group of parameters that the class of an optimizer treats differently by itself."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn


class DefaultGroup(NamedTuple):
    """Options that the class of an optimizer gives some parameters of a model by itself.

    Attributes:
        options: of the group.
        names: of its parameters in the model.
        check: of the class: gets the options of an entry and the shapes of the parameters that it
            matches, by name. It returns a line for the log, or None, and raises a ValueError if the
            options do not fit. None: there is nothing to be checked.
    """

    options: Mapping[str, Any]
    names: Collection[str]
    check: Callable[[Mapping[str, Any], Mapping[str, torch.Size]], str | None] | None = None

    @classmethod
    def of(cls, kind: Any, model: nn.Module) -> "DefaultGroup":
        """Return the group of an optimizer's class.

        It is empty, if the class has no method `default_groups`.

        Args:
            kind: the class.
            model: the complete model.
        """
        choose = getattr(kind, "default_groups", None)
        if choose is None:
            return cls({}, ())
        options, names = choose(model)
        return cls(options, names, getattr(kind, "check_group", None))
