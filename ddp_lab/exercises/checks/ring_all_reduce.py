"""Check of ring_all_reduce."""

from collections.abc import Mapping
from types import ModuleType

import torch.distributed as dist

from ddp_lab.exercises.explain import (
    Call,
    Wrong,
    contribution,
    counts,
    describe_sum,
    expect_only,
    of_all_ranks,
)

WRITE = ("ring_all_reduce",)
RANKS = (2, 3, 4)
HINTS = (
    "tensor.tensor_split(world_size) returns views: what you add to a chunk is added to the "
    "tensor.",
    "Every rank waits in recv until its left neighbour sends, so start the sending first: isend, "
    "recv, then wait().",
    "In the first half add what arrives: chunks[(rank - step - 1) % world_size] += received. In "
    "the second half copy it.",
)
POINT_TO_POINT = ("send", "recv", "isend", "irecv", "wait")


def check(theirs: ModuleType, calls: list[Call]) -> None:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    for length in (2 * ranks, 2 * ranks + 1):
        tensor = contribution(rank, [length])
        theirs.ring_all_reduce(tensor)
        expect_only(calls, POINT_TO_POINT, "use isend and recv between neighbours")
        explain(of_all_ranks(tensor.tolist()))
    sends = sum(call.name in ("send", "isend") for call in calls) / 2
    if sends != 2 * (ranks - 1):
        messages = "message" if sends == 1 else "messages"
        raise Wrong(
            f"The sums are right, but rank {rank} sent {sends:g} {messages} for one tensor: a ring "
            f"sends 2 (W-1) = {2 * (ranks - 1)}, one chunk in each, so that all links are busy at "
            "once."
        )


def explain(sums: list[list[float]]) -> None:
    """Raise an error about the first wrong element of any rank.

    Args:
        sums: what each rank holds in each element.
    """
    ranks = len(sums)
    length = len(sums[0])
    total = float(sum(10**rank for rank in range(ranks)))
    wrong = [
        (rank, index)
        for index in range(length)
        for rank in range(ranks)
        if sums[rank][index] != total
    ]
    if not wrong:
        return

    rank, index = wrong[0]
    value = sums[rank][index]
    column = [values[index] for values in sums]
    text = (
        f"Element {index} of {length} on rank {rank} holds {describe_sum(value, ranks)}; expected "
        "the sum of all ranks. "
    )

    times = counts(value, ranks)
    if length % ranks and all(each >= length - length % ranks for _, each in wrong):
        text += (
            f"{length} elements do not split into {ranks} equal chunks: the remainder is never "
            "sent."
        )
    elif times and max(times) > 1:
        text += (
            "Something is added twice: in the reduce-scatter send the chunk that was just added to "
            "(rank - step), and in the all-gather copy what arrives instead of adding it."
        )
    elif column.count(total) == 1:
        text += (
            f"Rank {column.index(total)} has it: after the reduce-scatter the all-gather, another "
            "W-1 steps, passes it on."
        )
    elif times and total not in column:
        text += "No rank has it: in the reduce-scatter "
        alone = all(sum(counts(each, ranks) or []) == 1 for values in sums for each in values)
        replaced = "add the received chunk to the rank's own, and do not replace it."
        text += replaced if alone else "send in step s the chunk that was just added to, rank - s."
    raise Wrong(text)


def explain_hang(waiting: Mapping[int, Call | None]) -> str | None:
    if all(call and call.name == "recv" for call in waiting.values()):
        return (
            "Every rank waits in recv for its left neighbour, and nobody has sent: start the "
            "sending (isend) before the recv."
        )
    return None
