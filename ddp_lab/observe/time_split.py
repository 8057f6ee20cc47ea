"""The division of a step's time into compute, exposed communication, waiting, data and idle.

It is read from the ranks' traces. Each moment of a step counts once, for the first of these
activities in progress:

| | GPU | CPU |
|---|---|---|
| compute | a kernel runs | an operation of ATen runs |
| communication, waiting | NCCL, or a copy or barrier between GPUs, runs | gloo communicates |
| data | a copy from the host, or the loader is at work | the loader is at work |
| idle | nothing runs: Python launches operations, or waits | Python runs between operations |

Communication that overlaps with compute therefore costs nothing here. A collective ends on all
ranks at about the same time and begins on a rank when that rank is ready for it. In each step, the
time of the rank that communicates for the shortest time is communication; what another rank takes
longer is waiting. In a pipeline every rank waits in every step, while the messages take little
time: there all of it counts as waiting.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

PARTS = ("compute", "communication", "waiting", "data", "idle")
# the names of the record_function ranges that `Profiled` adds to a trace
STEP = "ddp_lab step"
DATA = "ddp_lab data"
Span = tuple[float, float]  # start and end, in microseconds
# a part, the time at which the host launched it, and when it ran
Activity = tuple[str, float, Span]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint spans, in order, that cover the same times."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def read(trace: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """Return the milliseconds of compute, communication, data and idle in each step.

    They are those of each device of this rank, by its name.

    Waiting is part of communication here. A step begins when its batch is requested: an evaluation
    between two epochs belongs to no step. A rank that uses GPUs has no row for the CPU.

    Args:
        trace: the content of the file that torch.profiler writes, in Chrome's format.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges: dict[str, list[Span]] = {STEP: [], DATA: []}
    # a kernel and the host's call that launched it have the same correlation id
    launched: dict[int, float] = {}
    for event in events:
        if event["cat"] == "user_annotation" and event["name"] in ranges:
            ranges[event["name"]].append(span(event))
        elif event["cat"] in ("cuda_runtime", "cuda_driver"):
            launched[event["args"]["correlation"]] = event["ts"]

    devices: dict[str, list[Activity]] = defaultdict(list)
    for event in events:
        name = event["name"]
        args = event.get("args", {})
        when = span(event)
        if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            between = "nccl" in name.lower() or "symmetric_memory" in name or "PtoP" in name
            if between:
                part = "communication"
            elif "HtoD" in name:
                part = "data"
            else:
                part = "compute"
            # a copy between devices has no device in its args
            gpu = args.get("device", event["pid"])
            devices[f"cuda:{gpu}"].append((part, launched.get(args.get("correlation"), -1.0), when))
        elif event["cat"] == "cpu_op" and name.startswith("aten::"):
            devices["cpu"].append(("compute", when[0], when))
        elif name.startswith("gloo:"):
            devices["cpu"].append(("communication", when[0], when))

    names = sorted(devices.keys() - {"cpu"}) or ["cpu"]
    loading = ranges[DATA]
    steps = [
        (max((asked for asked, _ in loading if asked <= start), default=start), end)
        for start, end in sorted(ranges[STEP])
    ]
    return {name: split(devices[name], steps, loading, name == "cpu") for name in names}


def span(event: dict[str, Any]) -> Span:
    """Return the start and end of an event, in microseconds."""
    return event["ts"], event["ts"] + event["dur"]


def split(
    activities: list[Activity], steps: list[Span], loading: list[Span], on_host: bool
) -> list[dict[str, float]]:
    """Return the milliseconds of each part in each step of one device.

    A step of a GPU consists of the kernels that the host launched in it, even if they run later,
    and ends with the last.

    Args:
        activities: of the device.
        steps: the host's steps.
        loading: the times in which the loader worked.
        on_host: whether the device is the CPU.
    """
    rows: list[dict[str, float]] = []
    before = 0.0
    for asked, until in steps:
        mine = [(part, when) for part, launched, when in activities if asked <= launched < until]
        start = max(before, asked)
        end = until if on_host else max((when[1] for _, when in mine), default=until)
        before = end
        covered = list[Span]()
        known = 0.0
        times = dict[str, float]()
        for name in ("compute", "communication", "data"):
            covered = union(
                [
                    *covered,
                    *(when for part, when in mine if part == name),
                    *(loading if name == "data" else []),
                ]
            )
            now = sum(max(0.0, min(b, end) - max(a, start)) for a, b in covered)
            times[name] = (now - known) / 1000
            known = now
        rows.append(times | {"idle": (end - start - known) / 1000})
    return rows


def compare(ranks: list[dict[str, list[dict[str, float]]]], pipeline: bool) -> list[dict[str, Any]]:
    """Separate waiting from communication.

    Args:
        ranks: what `read` returns on each rank.
        pipeline: whether the ranks are stages of a pipeline.

    Returns:
        A row per device of each rank: `rank`, `device`, and the means in milliseconds of PARTS and
        of the whole `step`. They add up to that of the step. Medians do not: waiting that is long
        in a few steps would be in none of them.
    """
    by_rank = [
        [
            max(device["communication"] for device in step)
            for step in zip(*rank.values(), strict=True)
        ]
        for rank in ranks
    ]
    least = [0.0 if pipeline else min(step) for step in zip(*by_rank, strict=True)]

    rows: list[dict[str, Any]] = []
    for rank, devices in enumerate(ranks):
        for device, steps in devices.items():
            row = {part: statistics.mean(step[part] for step in steps) for part in steps[0]}
            needed = statistics.mean(
                min(step["communication"], time) for step, time in zip(steps, least, strict=True)
            )
            row |= {"communication": needed, "waiting": row["communication"] - needed}
            rows.append({"rank": rank, "device": device, "step": math.fsum(row.values())} | row)
    return rows


def diagnose(rows: list[dict[str, Any]], graph: bool, bubble: float | None) -> list[str]:
    """Return a diagnosis: a line for everything that stands out, with a remedy.

    Args:
        rows: as `compare` returns them.
        graph: whether the steps were replays of a CUDA graph.
        bubble: a pipeline's bubble by the formula, as a fraction of a step; None for other
            strategies.
    """
    mean = {part: statistics.mean(row[part] for row in rows) for part in ("step", *PARTS)}
    share = {part: mean[part] / mean["step"] for part in PARTS}
    against = (
        f"{mean['compute']:.2f} ms of compute against {mean['communication']:.2f} ms of exposed "
        "communication per step"
    )

    late = min(rows, key=lambda row: row["waiting"])
    longest = max(row["waiting"] for row in rows)
    lines: list[str] = []
    if bubble is not None:
        busiest = max(rows, key=lambda row: row["compute"])
        idle = 1 - busiest["compute"] / busiest["step"]
        lines.append(
            f"bubble: the busiest rank, {busiest['rank']}, does not compute for {idle:.0%} of a "
            f"step; formula {bubble:.0%}"
        )
    elif longest - late["waiting"] > 0.1 * mean["step"]:
        lines.append(
            f"straggler: rank {late['rank']} ({late['device']}). Others wait for it up to "
            f"{longest:.2f} ms of a step's {mean['step']:.2f}; it waits {late['waiting']:.2f}"
        )
    elif share["waiting"] > 0.15:
        lines.append(
            f"waiting: {share['waiting']:.0%} of a step, and not always for the same rank: the "
            "ranks' speed varies"
        )

    if mean["communication"] > mean["compute"]:
        lines.append(
            f"this model is too small to scale here: {against}. A larger batch gives the devices "
            "more to compute"
        )
    elif share["communication"] > 0.15:
        lines.append(
            f"communication: {against}. A larger batch makes it rarer; ddp overlaps a part of it "
            "with backward"
        )

    if share["idle"] > 0.4:
        if graph:
            remedy = "a larger batch helps"
        else:
            remedy = "cuda_graph=true, compile=true or a larger batch help"
        lines.append(
            f"idle: for {share['idle']:.0%} of a step devices have nothing to do while Python "
            f"launches work; {remedy}"
        )

    if share["data"] > 0.1:
        lines.append(
            f"data: for {share['data']:.0%} of a step devices wait for it; use data.loader=device "
            "or data.num_workers"
        )
    return lines or [f"compute is {share['compute']:.0%} of a step; nothing else stands out"]
