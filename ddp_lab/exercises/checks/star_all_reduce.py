"""Check of star_all_reduce."""

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

WRITE = ("star_all_reduce",)
RANKS = (3, 2, 4)
HINTS = (
    "Rank 0 does something else than the others: begin with `if rank == 0`.",
    "Rank 0 needs a second tensor to receive into, which it adds to its own, once for each other "
    "rank.",
    "Every send needs its recv in the same order: the others send, then receive; rank 0 receives "
    "from all, then sends to all.",
)
POINT_TO_POINT = ("send", "recv", "isend", "irecv", "wait")


def check(theirs: ModuleType, calls: list[Call]) -> None:
    tensor = contribution(dist.get_rank(), [4])
    theirs.star_all_reduce(tensor)
    expect_only(calls, POINT_TO_POINT, "use send and recv with rank 0")
    explain([values[0] for values in of_all_ranks(tensor.tolist())])


def explain(sums: list[float]) -> None:
    """Raise an error if a rank does not hold the sum.

    Args:
        sums: what each rank holds.
    """
    ranks = len(sums)
    total = float(sum(10**rank for rank in range(ranks)))
    wrong = [rank for rank, value in enumerate(sums) if value != total]
    if not wrong:
        return

    text = (
        f"Rank {wrong[0]} holds {describe_sum(sums[wrong[0]], ranks)}; expected the sum of all "
        "ranks. "
    )
    times = counts(sums[0], ranks)
    if sums[0] == total and all(sums[rank] == 10.0**rank for rank in wrong):
        text += (
            "Rank 0 has the sum, and has to send it back to the others, which receive it into "
            "`tensor`."
        )
    elif times and not times[0] and all(times[1:]):
        text += "Rank 0 forgot its own tensor: add to it what arrives, and do not begin from zeros."
    elif times and not times[0] and sum(times) == 1:
        text += (
            "What rank 0 received last replaced its own tensor: receive into another tensor, and "
            "add that."
        )
    elif wrong == [0] and times == [1] + [0] * (ranks - 1):
        text += (
            "It has sent the sum: `tensor = tensor + other` makes another tensor, `tensor += "
            "other` changes this one."
        )
    elif max(times or [2]) == 1 and max(counts(sums[wrong[0]], ranks) or [0]) > 1:
        text += (
            "What arrives from rank 0 is the sum already: receive it into the tensor, and do not "
            "add it."
        )
    elif sums[0] == total and counts(sums[wrong[0]], ranks):
        text += (
            "Rank 0 sent before the sum was complete: receive from all ranks first, then send to "
            "all."
        )
    raise Wrong(text)


def explain_hang(waiting: Mapping[int, Call | None]) -> str | None:
    first = waiting[0]
    others = [call for rank, call in waiting.items() if rank]
    if all(call and call.name == "recv" for call in waiting.values()):
        return (
            "Every rank waits in recv, and nobody has sent: the others send to rank 0 before they "
            "receive."
        )

    if first is None and any(others):
        return (
            "Rank 0 has returned, but others still wait for its sum: it sends to every rank from 1 "
            "to world_size - 1."
        )
    if first and not any(others):
        return (
            "Rank 0 waits for a rank that has returned: it receives once from each rank from 1 to "
            "world_size - 1."
        )
    return None
