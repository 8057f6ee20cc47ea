"""Orthogonalisation of a matrix by a Newton-Schulz iteration.

The iteration turns the singular values of a matrix into about 1, by matrix multiplications alone
(Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024, from where the
polynomial and its coefficients are).
"""

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST = 1e-7  # norm by which a matrix is divided


def orthogonal(matrix: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Return U V^T, about, for a matrix U S V^T, [m, n].

    Args:
        matrix: of any dtype.
        steps: of the iteration.
        dtype: in which it computes, and of the result.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    result = matrix.to(dtype=dtype, copy=True)
    if is_tall:  # the products are those of the shorter side
        result = result.T
    result.div_(result.norm().clamp(min=SMALLEST))
    for _ in range(steps):
        gram = result @ result.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        result = torch.addmm(result, polynomial, result, beta=a)
    return result.T if is_tall else result
