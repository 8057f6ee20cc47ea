"""What the time of a step went to, from the ranks' traces: compute, communication, waiting for peers, data, idle.

Each moment of a step counts once, for the first of these that was going on:

| | GPU | CPU |
|---|---|---|
| compute | a kernel runs | an operation of ATen runs |
| communication | an NCCL kernel or a copy between GPUs, and all that take part are there | gloo likewise |
| waiting | the same, before the last of them is there | likewise |
| data | a copy from the host, or the loader is at work | the loader is at work |
| idle | nothing: Python launches, or waits | Python between operations |

So communication that hides behind compute costs nothing here. A collective ends on all ranks at about the same time and
begins when a rank is ready for it: what it takes longer than on the rank where it was shortest, a rank waited. Traces of
gloo and of recorded graphs do not say which ranks belong together; there the same call of all groups is compared. A
message between two ranks is compared to the shortest of its kind, of any rank and step.
"""

import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ddp_lab.observe.trace import Call, Span, StepTrace, union

PARTS = ("compute", "communication", "waiting", "data", "idle")


def length(spans: Iterable[Span], start: float, end: float) -> float:
    """How much of [start, end] the spans cover."""
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in union(spans))


def split(ranks: list[dict[str, list[StepTrace]]]) -> list[dict[str, Any]]:
    """One row for each device of each rank: rank, device, and for each step the milliseconds of PARTS."""
    needed: dict[tuple, float] = {}
    for devices in ranks:
        for steps in devices.values():
            for index, step in enumerate(steps):
                for call in step.calls:
                    place = which(call, index)
                    needed[place] = min(needed.get(place, float("inf")), call.end - call.start)
    return [
        {"rank": rank, "device": device, "steps": [parts(step, index, needed) for index, step in enumerate(steps)]}
        for rank, devices in enumerate(ranks)
        for device, steps in devices.items()
    ]


def which(call: Call, step: int) -> tuple:
    """What a call is compared to."""
    message = any(word in call.name.lower() for word in ("send", "recv", "ptop"))
    return (call.name,) if message else (call.name, call.number, step)


def parts(step: StepTrace, index: int, needed: dict[tuple, float]) -> dict[str, float]:
    """Milliseconds; they add up to the step."""
    together = [(call.end - needed[which(call, index)], call.end) for call in step.calls]
    waiting = [(call.start, call.end) for call in step.calls]
    covered: list[Span] = []
    result, before = {}, 0.0
    for part, spans in zip(PARTS, (step.compute, together, waiting, step.data), strict=False):
        covered = union([*covered, *spans])
        now = length(covered, step.start, step.end)
        result[part], before = (now - before) / 1000, now
    result["idle"] = (step.end - step.start - before) / 1000
    return result


def summarise(row: dict[str, Any]) -> dict[str, float]:
    """The medians over the steps, of the whole step, too."""
    steps = row["steps"]
    medians = {part: statistics.median(step[part] for step in steps) for part in PARTS}
    return {"step": statistics.median(sum(step.values()) for step in steps)} | medians


def verdict(rows: list[dict[str, Any]], graph: bool, bubble: float | None) -> list[str]:
    """What it means, in words, for rows that have been summarised.

    Args:
        graph: the steps were replays of a CUDA graph.
        bubble: of a pipeline, by the formula.
    """
    mean = {part: statistics.mean(row[part] for row in rows) for part in ("step", *PARTS)}
    share = {part: mean[part] / mean["step"] for part in PARTS}
    said = []
    if bubble is not None:
        busiest = max(rows, key=lambda row: row["compute"])
        idle = 1 - busiest["compute"] / busiest["step"]
        said.append(
            f"bubble: the busiest rank, {busiest['rank']}, does not compute for {idle:.0%} of a step; formula {bubble:.0%}"
        )
    if bubble is None and (rank := straggler(rows)) is not None:
        waits = [row["waiting"] for row in rows]
        said.append(
            f"straggler: rank {rows[rank]['rank']} ({rows[rank]['device']}). Others wait for it up to {max(waits):.2f} ms of a "
            f"step's {mean['step']:.2f}; it waits {waits[rank]:.2f}"
        )
    elif bubble is None and share["waiting"] > 0.15:
        said.append(f"waiting: {share['waiting']:.0%} of a step, and not always for the same rank: their speed varies")
    against = f"{mean['compute']:.2f} ms of compute against {mean['communication']:.2f} ms of communication in every step"
    if mean["communication"] > mean["compute"]:
        said.append(
            f"this model is too small to scale here: {against} that nothing hides. A larger batch gives devices more to do"
        )
    elif share["communication"] > 0.15:
        said.append(
            f"communication: {against} that nothing hides. A larger batch makes it rarer; ddp hides some behind backward"
        )
    if share["idle"] > 0.4:
        remedy = "a larger batch helps" if graph else "cuda_graph=true, compile=true or a larger batch help"
        said.append(
            f"idle: for {share['idle']:.0%} of a step devices have nothing to do while Python launches operations; {remedy}"
        )
    if share["data"] > 0.1:
        said.append(
            f"data: devices wait for it for {share['data']:.0%} of a step; data.loader=device, or more data.num_workers"
        )
    if not said:
        said.append(f"compute is {share['compute']:.0%} of a step; nothing else stands out")
    return said


def straggler(rows: list[dict[str, Any]]) -> int | None:
    """The row that waits least in at least four steps of five, where others wait for a tenth of a step longer."""
    least = Counter(
        min(range(len(rows)), key=lambda row: steps[row]["waiting"])
        for steps in zip(*(row["steps"] for row in rows), strict=False)
    )
    row, times = least.most_common(1)[0]
    longer = max(other["waiting"] for other in rows) - rows[row]["waiting"]
    return row if 5 * times >= 4 * least.total() and longer > 0.1 * rows[row]["step"] else None
