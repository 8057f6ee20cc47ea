"""The exchanges of all pairs of ranks, by rounds, seen from one rank."""

import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from ddp_lab.launchers.fabric.child import LIMIT, Answer, Child
from ddp_lab.launchers.fabric.rounds import rounds_of
from ddp_lab.launchers.fabric.transfer import Meeting
from ddp_lab.world.ranks import Ranks

# Seconds for each machine after which no further round begins; each round with a pair that hangs
# takes LIMIT and the start of new processes.
BUDGET = 25.0
WITHOUT_PEERS = {"NCCL_P2P_DISABLE": "1"}

Measure = Callable[[dict[str, Any], Meeting], float]


class Exchange(NamedTuple):
    """What a pair of ranks has come to.

    Attributes:
        pair: the ranks.
        rate: GB/s of each direction; None if one of both has not finished.
        problem: why not; "" if both have.
        hung: whether one of both took too long.
    """

    pair: tuple[int, int]
    rate: float | None
    problem: str
    hung: bool


def measure_rounds(runtime: Ranks, child: Child, measure: Measure) -> list[Exchange]:
    """Let all pairs of ranks exchange. Collective.

    Args:
        runtime: the ranks.
        child: of this rank, on its device.
        measure: exchanges with another rank, in the child.

    Returns:
        The exchanges; those for which there was no time are missing.
    """
    exchanges: list[Exchange] = []
    run = runtime.broadcast_from_rank0("fabric", lambda: uuid.uuid4().hex)
    deadline = time.monotonic() + BUDGET * runtime.nodes
    for number, pairs in enumerate(rounds_of(runtime.world_size)):
        exchanges += measure_round(runtime, child, measure, pairs, f"{run}/{number}")
        is_over = runtime.broadcast_from_rank0("time", lambda: float(time.monotonic() > deadline))
        if is_over:
            break
    return exchanges


def measure_round(
    runtime: Ranks,
    child: Child,
    measure: Measure,
    pairs: list[tuple[int, int]],
    prefix: str,
) -> list[Exchange]:
    """Let disjoint pairs of ranks exchange at the same time. Collective.

    Args:
        runtime, child, measure: as in `measure_rounds`.
        pairs: of ranks.
        prefix: of this round's keys in the store.
    """
    mine = next((pair for pair in pairs if runtime.rank in pair), None)
    answer = Answer()
    if mine is not None:
        host, port = runtime.master
        key = f"{prefix}/{mine[0]}-{mine[1]}"
        meeting = Meeting(host, port, key, mine, mine.index(runtime.rank))
        answer = child.call(measure, meeting)
    by_rank = runtime.gather_and_decide("round", list(answer), lambda answers: answers)
    return [combine(pair, by_rank) for pair in pairs]


def combine(pair: tuple[int, int], by_rank: list[Any]) -> Exchange:
    """Return what a pair has come to, from the answers of all ranks.

    An exception says more than a time limit, which may only follow from it.
    """
    answers = [Answer(*by_rank[rank]) for rank in pair]
    problems = sorted(
        (answer.hung, f"rank {rank}: {answer.problem}")
        for rank, answer in zip(pair, answers, strict=True)
        if answer.problem
    )
    if not problems:
        return Exchange(pair, min(answer.value for answer in answers), "", False)
    if all(answer.hung for answer in answers):
        return Exchange(pair, None, f"did not exchange within {LIMIT:.0f} s", True)
    hung, problem = problems[0]
    return Exchange(pair, None, problem, hung)


def works_without_peers(
    runtime: Ranks, child: Child, measure: Measure, failed: list[Exchange]
) -> tuple[int, int] | None:
    """Let the first pair that failed exchange again without peer-to-peer access. Collective.

    Args:
        runtime, child, measure: as in `measure_rounds`.
        failed: the pairs of one machine that failed.

    Returns:
        The pair if it exchanges now, and else None.
    """
    if not failed:
        return None
    pair = failed[0].pair
    if runtime.rank in pair:
        child.restart(WITHOUT_PEERS)
    run = runtime.broadcast_from_rank0("again", lambda: uuid.uuid4().hex)
    (again,) = measure_round(runtime, child, measure, [pair], run)
    return None if again.problem else pair
