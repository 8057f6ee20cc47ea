"""Check of sharded_optimizer against an optimizer that keeps its whole state."""

from collections.abc import Mapping
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.exercises.explain import Call, Wrong, named, of_all_ranks

WRITE = ("ShardedSGD.__init__", "ShardedSGD.step")
RANKS = (2, 3)
HINTS = (
    "range(rank, len(parameters), world_size) are the indices of a rank's own parameters.",
    "First update the own parameters, then let all ranks broadcast all parameters, in the same "
    "order on every rank.",
    "dist.broadcast(parameter, src=owner): the source is the same number on all ranks.",
)
# two different numbers, or an exchange of them would not show
LR = 0.25
MOMENTUM = 0.5


def check(theirs: ModuleType, calls: list[Call]) -> None:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    parameters = [
        nn.Parameter(torch.full([2], float(index), dtype=torch.float64))
        for index in range(ranks + 2)
    ]
    optimizer = theirs.ShardedSGD(parameters, LR, MOMENTUM)
    own_indices = list(range(rank, len(parameters), ranks))
    expected = [float(index) for index in range(ranks + 2)]
    buffers = [0.0] * len(parameters)

    for step in (1, 2, 3):
        gradients = [float(step + index) for index in range(len(parameters))]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.full([2], gradient, dtype=torch.float64)
        optimizer.step()
        if sorted(optimizer.buffers) != own_indices:
            text = (
                f"Rank {rank} of {ranks} keeps momentum buffers of "
                f"{named('parameter', sorted(optimizer.buffers))}: expected "
                f"{named('parameter', own_indices)}, "
            )
            raise Wrong(text + "its own. The sharded state is what ZeRO-1 saves.")

        before = expected
        buffers = [
            MOMENTUM * buffer + gradient
            for buffer, gradient in zip(buffers, gradients, strict=True)
        ]
        expected = [value - LR * buffer for value, buffer in zip(before, buffers, strict=True)]
        pairs = zip(parameters, expected, strict=True)
        worst_values = [worst(each.tolist(), right) for each, right in pairs]
        explain(of_all_ranks(worst_values), expected, before, step)


def worst(values: list[float], right: float) -> float:
    """Return the element of a parameter that differs the most from the value of all."""
    return max(values, key=lambda value: abs(value - right))


def explain(
    worst_values: list[list[float]], expected: list[float], before: list[float], step: int
) -> None:
    """Raise an error if the parameters of a rank are not the expected ones.

    Args:
        worst_values: of each parameter the element that differs the most, by rank.
        expected: those after the step.
        before: those before the step.
        step: number of the step.
    """
    ranks = len(worst_values)
    indices = range(len(expected))
    wrong = [
        (rank, index)
        for rank in range(ranks)
        for index in indices
        if worst_values[rank][index] != expected[index]
    ]

    if not wrong:
        return
    rank, index = wrong[0]
    owner = index % ranks
    value = worst_values[rank][index]
    text = (
        f"Step {step}: parameter {index} is {value:g} on rank {rank}, expected "
        f"{expected[index]:g}. Rank {owner} owns it. "
    )

    right_on_owner = all(worst_values[each % ranks][each] == expected[each] for each in indices)
    if right_on_owner and value == before[index]:
        text += (
            "Its owner has updated it, and has to send it to the others: a broadcast after the "
            "update."
        )
    elif all(values[index] == before[index] for values in worst_values):
        text += (
            "No rank has updated it, or the weights from before the update were sent over it: "
            "first update, then broadcast."
        )
    elif step == 1 and value == before[index] - MOMENTUM * (step + index):
        text += (
            "lr and momentum are exchanged: the buffer is multiplied by momentum, the update by lr."
        )
    elif not right_on_owner and step == 2:
        text += (
            "The first step was right: the momentum buffer becomes momentum * buffer + gradient, "
            "and is kept between steps."
        )
    raise Wrong(text)


def explain_hang(waiting: Mapping[int, Call | None]) -> str | None:
    if any(call and call.name == "broadcast" for call in waiting.values()):
        return (
            "A broadcast waits for its source: all ranks broadcast all parameters, in one order, "
            "each from its owner."
        )
    return None
