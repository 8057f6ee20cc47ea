"""Inputs of the model on the device of a rank, with padding where the rank has no sample.

Every rank calls the model, because its calls may communicate. One that has no sample of a batch
passes a row that it had in another one.
"""

import itertools
from collections.abc import Hashable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.trees import Tree

T = TypeVar("T")


class SpareRows:
    """A sample of the inputs of each form, with which a rank is padded when it has none.

    Args:
        device: of the rank.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._rows: dict[Hashable, list[torch.Tensor]] = {}

    def place(self, inputs: T, spare: Tree) -> T:
        """Return inputs on the device; those of a rank that has no sample with one of padding.

        Args:
            inputs: arguments and keywords of the model.
            spare: inputs of a sample, for a rank that never had one; None: there are none.
        """
        tensors = tensors_of(inputs)
        form = form_of(tensors)
        if have_samples(tensors) and form not in self._rows:
            self._rows[form] = [row_of(tensor) for tensor in tensors]
        row = self._rows.get(form) or tensors_of(spare)
        return placed(inputs, row, self.device)


def have_samples(tensors: list[torch.Tensor]) -> bool:
    """Return whether tensors have rows, of which scalars have none."""
    return all(len(tensor) for tensor in tensors if tensor.dim())


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers, in their order."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def form_of(tensors: list[torch.Tensor]) -> Hashable:
    """Return what the rows of tensors have in common with other ones: shapes and dtypes."""
    return tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the first row of a tensor; of a scalar the scalar."""
    return (tensor[:1] if tensor.dim() else tensor).detach().clone()


def placed(inputs: T, rows: list[torch.Tensor], device: torch.device) -> T:
    """Return inputs on a device; those of a rank that has no sample with one of padding.

    Args:
        inputs: arguments and keywords of the model.
        rows: a sample, used if it has the form of `inputs`: of zeros, as of a mask of nothing, a
            model may make NaN.
        device: of the rank.
    """
    fits = form_of(rows) == form_of(tensors_of(inputs))
    padding = iter(rows if fits else itertools.repeat(None))

    def place(tensor: torch.Tensor) -> torch.Tensor:
        row = next(padding)
        tensor = tensor.to(device)
        if not tensor.dim() or len(tensor):
            return tensor
        if row is None:
            row = tensor.new_zeros(1, *tensor.shape[1:])
        # concatenated, because gradients of other models may pass through the empty tensor
        return torch.cat([tensor, row.to(device)])

    return tree_map_only(torch.Tensor, place, inputs)


def without_rows(output: torch.Tensor) -> torch.Tensor:
    """Return an output of padding alone without its row.

    Raises:
        ConfigError: it has no rows.
    """
    if not output.dim():
        raise ConfigError(
            "forward: a rank that has no sample got an output of shape [], from which padding "
            "cannot be left out. Let the model return outputs with a row for each sample"
        )
    return output[:0]
