"""What a check reports: a wrong result, and the ranks' contributions that a sum contains."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Wrong(Exception):
    """The learner's solution is wrong; the message explains how."""


class Call(NamedTuple):
    """A call of torch.distributed from the learner's file.

    Attributes:
        name: of the function, for example recv; wait of a Work.
        line: number of the line of the learner's file that calls it.
        async_op: whether the call returns before the collective ends.
    """

    name: str
    line: int
    async_op: bool = False


@cache
def group_of_the_check() -> dist.ProcessGroup:
    """Return a group of all ranks for the collectives of the check.

    They never meet one of the learner's that another rank has not made.
    """
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def of_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, so that each can explain what is wrong on any. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group_of_the_check())
    return values


def unchanged(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a learner's function returns.

    Raises:
        Wrong: it has changed a tensor that it was given.
    """
    before = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
    returned = function(*arguments)
    for number, (each, old) in enumerate(zip(arguments, before, strict=True), 1):
        if isinstance(old, torch.Tensor) and not (
            each.shape == old.shape and torch.equal(each, old)
        ):
            raise Wrong(
                f"{function.__name__} changes its argument {number}, which others still use: "
                "compute a new tensor."
            )
    return returned


def plain(value: Any) -> Any:
    """Return a tensor of integers, an iterator or a tuple, also nested, as lists.

    Only the numbers are compared.
    """
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, (list, tuple, Iterator)) else value


def named(noun: str, values: Sequence[object]) -> str:
    """Return numbered things for a text: "no sample", "sample 3" or "samples 3, 5 and 7"."""
    if not values:
        return f"no {noun}"
    *others, last = map(str, values)
    if not others:
        return f"{noun} {last}"
    return f"{noun}s {', '.join(others)} and {last}"


def expect_only(calls: Sequence[Call], allowed: Sequence[str], instead: str) -> None:
    """Check which functions of torch.distributed the learner has called.

    Raises:
        Wrong: one that would do the exercise.
    """
    for call in calls:
        if call.name not in allowed:
            raise Wrong(
                f"line {call.line} calls {call.name}, which this exercise does without: {instead}."
            )


def contribution(rank: int, shape: Sequence[int]) -> torch.Tensor:
    """Return a float64 tensor whose sums over ranks show which ranks they contain.

    Each digit counts one rank.
    """
    return torch.full(tuple(shape), 10.0**rank, dtype=torch.float64)


def counts(value: float, ranks: int) -> list[int] | None:
    """Return how often a sum of contributions contains each rank's; None if it is no such sum."""
    digits = list[int]()
    rest = round(value)
    if rest != value or not 0 <= rest < 10**ranks:
        return None
    for _ in range(ranks):
        rest, digit = divmod(rest, 10)
        digits.append(digit)
    return digits


def describe_sum(value: float, ranks: int) -> str:
    """Return what a sum of contributions holds, such as "rank 0 twice and not rank 2"."""
    if abs(value * ranks - sum(10**rank for rank in range(ranks))) < 1e-6:
        return "the average over the ranks instead of the sum"
    times_by_rank = counts(value, ranks)
    if times_by_rank is None:
        return f"{value:g}, which is no sum of the ranks' values"
    if all(count == 1 for count in times_by_rank):
        return "the sum of all ranks"

    alone = [rank for rank, count in enumerate(times_by_rank) if count]
    if len(alone) == 1 and times_by_rank[alone[0]] == 1:
        return f"only rank {alone[0]}'s value"
    words = {2: "twice", 3: "three times"}
    often = [
        f"rank {rank} {words.get(count, f'{count} times')}"
        for rank, count in enumerate(times_by_rank)
        if count > 1
    ]
    lacking = [f"not rank {rank}" for rank, count in enumerate(times_by_rank) if not count]
    return " and ".join(often + lacking)


def expect_tensor(
    value: Any, shape: Sequence[int], name: str, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return a tensor of the learner's.

    Args:
        value: what the learner's function returned.
        shape: the shape it must have.
        name: the subject of the message, for example "local_batch".
        dtype: the type that its elements must have.

    Raises:
        Wrong: it is no tensor, or has another shape or type.
    """
    if not isinstance(value, torch.Tensor):
        raise Wrong(
            f"{name} returned {type(value).__name__}: expected a tensor of shape {list(shape)}; is "
            "a `return` missing?"
        )
    if list(value.shape) != list(shape):
        raise Wrong(
            f"{name} returned a tensor of shape {list(value.shape)}: expected {list(shape)}"
        )
    if value.dtype != dtype:
        raise Wrong(
            f"{name} returned a tensor of {value.dtype}: expected {dtype}, that of its input"
        )
    return value
