"""The division of a step's time into compute, exposed communication, waiting for other ranks, data and idle.

It is computed from the ranks' traces. Each moment of a step counts once, for the first of these activities in progress:

| | GPU | CPU |
|---|---|---|
| compute | a kernel runs | an operation of ATen runs |
| communication | an NCCL kernel or a copy between GPUs, after all participants have started | gloo likewise |
| waiting | the same, before the last participant has started | likewise |
| data | a copy from the host, or the loader is at work | the loader is at work |
| idle | nothing runs: Python launches operations, or waits | Python runs between operations |

Communication that overlaps with compute therefore costs nothing here. A collective ends on all ranks at about the same time
and begins on a rank when that rank is ready for it. Its shortest duration over the ranks counts as communication; any
additional time on another rank counts as waiting. Traces of gloo and of captured CUDA graphs do not name the ranks of a group,
so there the durations of a call are compared over all groups. The duration of a message between two ranks is compared with the
shortest one of its kind, over all ranks and steps.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ddp_lab.observe.trace import Call, Span, StepTrace, union

PARTS = ("compute", "communication", "waiting", "data", "idle")
Key = tuple[str] | tuple[str, int, int]  # name; for collectives also the number of the call in its step, and the step


def length(spans: Iterable[Span], start: float, end: float) -> float:
    """Return how many microseconds of [start, end] the spans cover."""
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in union(spans))


def split_steps(ranks: list[dict[str, list[StepTrace]]]) -> list[dict[str, Any]]:
    """Split the time of every step.

    Args:
        ranks: one dict per rank, with the steps of each of its devices by the device's name.

    Returns:
        A row per device of each rank: `rank`, `device`, and `steps` with the milliseconds of PARTS for each step.
    """
    needed: dict[Key, float] = {}
    for devices in ranks:
        for steps in devices.values():
            for index, step in enumerate(steps):
                for call in step.calls:
                    key = comparison_key(call, index)
                    needed[key] = min(needed.get(key, float("inf")), call.end - call.start)
    return [
        {"rank": rank, "device": device, "steps": [parts(step, index, needed) for index, step in enumerate(steps)]}
        for rank, devices in enumerate(ranks)
        for device, steps in devices.items()
    ]


def comparison_key(call: Call, step: int) -> Key:
    """Return a key that is the same for all calls whose durations are compared."""
    message = any(word in call.name.lower() for word in ("send", "recv", "ptop"))
    return (call.name,) if message else (call.name, call.number, step)


def parts(step: StepTrace, index: int, needed: dict[Key, float]) -> dict[str, float]:
    """Return the milliseconds of PARTS in one step; their sum is the time of the step.

    Args:
        step: what one device did.
        index: number of the step.
        needed: shortest duration of each call, in microseconds.
    """
    communication = [(call.end - needed[comparison_key(call, index)], call.end) for call in step.calls]
    waiting = [(call.start, call.end) for call in step.calls]
    covered: list[Span] = []
    result: dict[str, float] = {}
    before = 0.0
    for part, spans in zip(PARTS, (step.compute, communication, waiting, step.data), strict=False):
        covered = union([*covered, *spans])
        now = length(covered, step.start, step.end)
        result[part], before = (now - before) / 1000, now
    result["idle"] = (step.end - step.start - before) / 1000
    return result


def summarise(row: dict[str, Any]) -> dict[str, float]:
    """Return the means over the steps, in milliseconds, of PARTS and of the whole step.

    The means of PARTS add up to that of the step. Medians do not: waiting that is long in a few steps would be in none of them.
    """
    means = {part: statistics.mean(step[part] for step in row["steps"]) for part in PARTS}
    return {"step": math.fsum(means.values())} | means


def diagnose(rows: list[dict[str, Any]], graph: bool, bubble: float | None) -> list[str]:
    """Return a diagnosis: a line for everything that stands out, with a remedy.

    Args:
        rows: rows of `split_steps` to which the means of `summarise` have been added.
        graph: whether the steps were replays of a CUDA graph.
        bubble: a pipeline's bubble by the formula, as a fraction of a step; None for other strategies.
    """
    mean = {part: statistics.mean(row[part] for row in rows) for part in ("step", *PARTS)}
    share = {part: mean[part] / mean["step"] for part in PARTS}
    lines: list[str] = []
    if bubble is not None:
        busiest = max(rows, key=lambda row: row["compute"])
        idle = 1 - busiest["compute"] / busiest["step"]
        lines.append(
            f"bubble: the busiest rank, {busiest['rank']}, does not compute for {idle:.0%} of a step; formula {bubble:.0%}"
        )
    if bubble is None and (rank := straggler(rows)) is not None:
        waits = [row["waiting"] for row in rows]
        lines.append(
            f"straggler: rank {rows[rank]['rank']} ({rows[rank]['device']}). Others wait for it up to {max(waits):.2f} ms of a "
            f"step's {mean['step']:.2f}; it waits {waits[rank]:.2f}"
        )
    elif bubble is None and share["waiting"] > 0.15:
        lines.append(f"waiting: {share['waiting']:.0%} of a step, and not always for the same rank: the ranks' speed varies")
    against = f"{mean['compute']:.2f} ms of compute against {mean['communication']:.2f} ms of exposed communication per step"
    if mean["communication"] > mean["compute"]:
        lines.append(f"this model is too small to scale here: {against}. A larger batch gives the devices more to compute")
    elif share["communication"] > 0.15:
        lines.append(
            f"communication: {against}. A larger batch makes it rarer; ddp overlaps a part of it with the backward pass"
        )
    if share["idle"] > 0.4:
        remedy = "a larger batch helps" if graph else "cuda_graph=true, compile=true or a larger batch help"
        lines.append(
            f"idle: for {share['idle']:.0%} of a step devices have nothing to do while Python launches operations; {remedy}"
        )
    if share["data"] > 0.1:
        lines.append(
            f"data: devices wait for data for {share['data']:.0%} of a step; use data.loader=device or more data.num_workers"
        )
    if not lines:
        lines.append(f"compute is {share['compute']:.0%} of a step; nothing else stands out")
    return lines


def straggler(rows: list[dict[str, Any]]) -> int | None:
    """Return the index of the straggler's row; None if there is no straggler.

    A straggler has the shortest waiting time in at least four of five steps, and another rank waits longer by more than a
    tenth of a step on average.
    """
    least = Counter(
        min(range(len(rows)), key=lambda row: steps[row]["waiting"])
        for steps in zip(*(row["steps"] for row in rows), strict=False)
    )
    row, times = least.most_common(1)[0]
    longer = max(other["waiting"] for other in rows) - rows[row]["waiting"]
    return row if 5 * times >= 4 * least.total() and longer > 0.1 * rows[row]["step"] else None


def mean_split(summary: dict[str, Any]) -> dict[str, float]:
    """Return the milliseconds of PARTS, averaged over all devices of a summary.json."""
    return {part: statistics.mean(row[part] for row in summary["rows"]) for part in PARTS}
