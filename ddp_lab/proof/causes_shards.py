"""Causes that show in the shards of a tensor."""

from itertools import permutations

import torch
from torch import Tensor

from ddp_lab.proof.causes_factor import Cause, close
from ddp_lab.proof.evidence import Case
from ddp_lab.proof.report import factor_text, is_whole

MOST_PERMUTED = 6  # shards of which all orders are tried


def by_shards(case: Case) -> Cause | None:
    """Explain a tensor whose shards are scaled or in another order."""
    if not case.agree:
        return None
    value = case.values()[0]
    is_square = value.dim() == 2 and value.shape[0] == value.shape[1]
    if is_square and case.equal(case.reference.T, value):
        return Cause(None, "The tensor is transposed.")
    for dim in range(value.dim()):
        cause = of_dimension(case, value, dim)
        if cause:
            return Cause(None, cause)
    return None


def of_dimension(case: Case, value: Tensor, dim: int) -> str | None:
    """Return the cause if the shards are those of one dimension."""
    ranks = case.world_size
    right = case.reference.tensor_split(ranks, dim)
    shards = value.tensor_split(ranks, dim)
    if value.shape[dim] < ranks or ranks == 1:
        return None
    order = order_of(case, right, shards)
    if order:
        return (
            f"The {ranks} shards of dimension {dim} are in the order {order}: they are gathered or "
            "sharded in another order of ranks."
        )
    factors = [case.factor(one, other) for one, other in zip(right, shards, strict=True)]
    known = [factor for factor in factors if factor is not None]
    if len(known) < ranks:
        return None
    texts = ", ".join(factor_text(factor) if factor else "0" for factor in known)
    text = f"The {ranks} shards of dimension {dim} have the factors {texts}"
    if not any(abs(factor) > 1e-6 for factor in known[1:]) or min(map(abs, known)) < 1e-6:
        return f"{text}: shards are not gathered, or not updated, on the rank that returns them."
    odd = [factor for factor in known if not close(factor, 1)]
    if len(odd) < ranks and all(is_whole(factor) or is_whole(1 / factor) for factor in odd):
        return f"{text}: a shard is summed or divided more often than the others."
    norms = shard_norms(case, dim)
    if max(norms) - min(norms) <= 1e-4 * max(norms):
        return (
            f"{text}, after which the shards of every rank have the same norm, {norms[0]:.3g}: "
            "each rank clips by the norm of its own shard. Sum the squares over the ranks before "
            "the root."
        )
    return (
        f"{text}: each rank scales its shard by a number that it computes from this shard alone, "
        "such as its norm. Sum the squares over the ranks before the root."
    )


def shard_norms(case: Case, dim: int) -> list[float]:
    """Return the norm of all shards of each rank that differ from those expected."""
    squares = torch.zeros(case.world_size, dtype=torch.float64)
    for name in case.of_step(case.expected):
        value = case.values(name)[0].double() if case.values(name) else torch.zeros(())
        if value.dim() > dim and value.shape[dim] >= case.world_size:
            shards = value.tensor_split(case.world_size, dim)
            squares += torch.stack([shard.square().sum() for shard in shards])
    return squares.sqrt().tolist()


def order_of(case: Case, right: tuple[Tensor, ...], shards: tuple[Tensor, ...]) -> list[int] | None:
    """Return which expected shard is at each place, if they are permuted."""
    if len(right) > MOST_PERMUTED:
        return None
    for order in permutations(range(len(right))):
        pairs = zip(order, shards, strict=True)
        if all(
            right[place].shape == shard.shape and case.equal(right[place], shard)
            for place, shard in pairs
        ):
            return list(order)
    return None
