"""Complex numbers as pairs of real ones, for what torch computes of real numbers only."""

import torch


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as real numbers, [..., 2]; others as they are.

    They share their memory, unless the tensor is a conjugate that torch has not computed yet.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
