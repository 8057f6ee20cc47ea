"""An optimizer whose parameters are divided into groups by their names in the model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ddp_lab.training.optimizer import MakeOptimizer


class GroupedOptimizer(NamedTuple):
    """A function of parameters, or of groups of them, that divides each into groups by name.

    Attributes:
        make: makes the optimizer of the groups.
        options: of each group.
        places: of the group of a parameter in `options`, by the identity of the parameter. Others
            are in the first group.
    """

    make: MakeOptimizer
    options: Sequence[Mapping[str, Any]]
    places: Mapping[int, int]

    def __call__(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Return the optimizer.

        Args:
            parameters: a list of parameters, or dicts with the key params. Their other options
                count where the group by name does not have them.
        """
        incoming: list[Any] = [*parameters]
        if not (incoming and isinstance(incoming[0], dict)):
            incoming = [{"params": incoming}]
        divided: list[dict[str, Any]] = []
        for place, options in enumerate(self.options):
            for group in cast("list[dict[str, Any]]", incoming):
                members = [each for each in group["params"] if self._place_of(each) == place]
                divided.append({**group, **options, "params": members})
        return self.make(divided)

    def _place_of(self, parameter: nn.Parameter) -> int:
        return self.places.get(id(parameter), 0)
