"""Overviews of many ranks: what they do, and which of them have the least progress.

Every node sends one to node 0, which merges them to one of all ranks. Its size does not depend on the number of ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_lab.resilience.node_board import Heartbeat

LISTED = 8  # the most ranks that a message lists one by one
PHASES = (
    "starting",
    "preparing",
    "compiling",
    "loading",
    "training",
    "finishing",
    "deciding",
    "saving",
    "evaluating",
    "done",
)


def suspicion(heartbeat: Heartbeat) -> tuple[int, bool, int, float]:
    """Return the sort key of a rank in a hang: the other ranks wait for the rank with the smallest key.

    That is the rank with the least progress. In the same step, ranks that wait in a collective are sorted last: a rank can hang
    after a collective in which the others still wait for its data.
    """
    return heartbeat["step"], heartbeat["waits"], PHASES.index(heartbeat["doing"]), heartbeat["since"]


@dataclass
class Overview:
    """What a number of ranks do.

    Attributes:
        states: by phase, the number of ranks in it and their first and last step.
        least: heartbeats of the ranks with the least progress, at most LISTED + 1, the least first.
    """

    states: dict[str, Sequence[int]]
    least: list[Heartbeat]

    @classmethod
    def of(cls, heartbeats: Iterable[Heartbeat]) -> "Overview":
        """Return the overview of some ranks."""
        return merge(cls({beat["doing"]: (1, beat["step"], beat["step"])}, [beat]) for beat in heartbeats)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Overview":
        """Return the overview in a record that has the attributes as keys."""
        return cls(record["states"], record["least"])

    def __str__(self) -> str:
        return "; ".join(
            f"{number:,} {doing}, step {first}" + (f" to {last}" if last > first else "")
            for doing, (number, first, last) in self.states.items()
        )


def merge(overviews: Iterable[Overview]) -> Overview:
    """Return the overview of all ranks that are in one of several."""
    states: dict[str, Sequence[int]] = {}
    least: list[Heartbeat] = []
    for one in overviews:
        least = sorted([*least, *one.least], key=suspicion)[: LISTED + 1]
        for doing, (number, first, last) in one.states.items():
            before, lowest, highest = states.get(doing, (0, first, last))
            states[doing] = before + number, min(lowest, first), max(highest, last)
    return Overview(states, least)


def find_last(near: list[Heartbeat], everyone: Overview | None) -> Heartbeat:
    """Return the heartbeat of the rank for which the others wait.

    Args:
        near: the heartbeats of this node's ranks.
        everyone: the overview of all ranks, which is older; None if they are all on this node.
    """
    far = [beat for beat in everyone.least if beat["node"] != near[0]["node"]] if everyone else []
    return min([*near, *far], key=suspicion)
