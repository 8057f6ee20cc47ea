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
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

STEP, DATA = "ddp_lab step", "ddp_lab data"  # the ranges that a trace must have
PARTS = ("compute", "communication", "waiting", "data", "idle")
ELEMENT_BYTES = {"double": 8, "long": 8, "long int": 8, "float": 4, "int": 4, "bfloat16": 2, "c10::bfloat16": 2, "half": 2}

Span = tuple[float, float]  # from, to


class Call(NamedTuple):
    """One rank's share of a collective, or a message; `number` says which of this name in its step."""

    name: str
    number: int
    start: float
    end: float


class StepTrace(NamedTuple):
    """What one device did in one step; times in microseconds of the rank's own clock."""

    start: float
    end: float
    compute: list[Span]
    calls: list[Call]
    data: list[Span]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments as disjoint spans, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span], start: float, end: float) -> float:
    """How much of [start, end] the spans cover."""
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in union(spans))


def read(trace: dict[str, Any]) -> dict[str, list[StepTrace]]:
    """The steps of every device in a trace of torch.profiler (Chrome's format)."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    steps, loading = spans_of_steps(events), host_ranges(events, DATA)
    if not kernels:
        return {"cpu": read_cpu(events, steps, loading)}
    by_device, launched = defaultdict(list), launches(events)
    for kernel in kernels:
        device = kernel["args"].get("device", kernel["pid"])  # a copy between devices names none
        by_device[device].append((launched.get(kernel["args"].get("correlation"), -1.0), kernel))
    return {f"cuda:{device}": read_gpu(mine, steps, loading) for device, mine in sorted(by_device.items())}


def span(event: dict) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def launches(events: list[dict]) -> dict[int, float]:
    """When the host launched what, by the number that a kernel and its launch have in common."""
    return {event["args"]["correlation"]: event["ts"] for event in events if event["cat"] in ("cuda_runtime", "cuda_driver")}


def host_ranges(events: list[dict], name: str) -> list[Span]:
    """The trace has ranges of this name on the GPU, too."""
    return sorted(span(event) for event in events if event["name"] == name and event["cat"] == "user_annotation")


def spans_of_steps(events: list[dict]) -> list[Span]:
    """By the host's clock. A step begins when its batch is asked for; what lies between an epoch's last step, after which
    a batch is asked for in vain, and the next epoch's first is no step's."""
    found, before, loading = [], 0.0, host_ranges(events, DATA)
    for start, end in host_ranges(events, STEP):
        asked = [begin for begin, until in loading if before <= begin and until <= start]
        found.append((asked[-1] if asked else start, end))
        before = end
    return found


def read_cpu(events: list[dict], steps: list[Span], loading: list[Span]) -> list[StepTrace]:
    compute = [span(event) for event in events if event["cat"] == "cpu_op" and event["name"].startswith("aten::")]
    calls = [
        (f"{event['name']} {event['args'].get('Input Dims')}", *span(event))
        for event in events
        if event["name"].startswith("gloo:")
    ]
    found = []
    for asked, end in steps:
        inside = [call for call in calls if asked <= call[1] < end]
        found.append(StepTrace(asked, end, within(compute, asked, end), numbered(inside), within(loading, asked, end)))
    return found


def read_gpu(kernels: list[tuple[float, dict]], steps: list[Span], loading: list[Span]) -> list[StepTrace]:
    """A step's kernels are those launched in it, whenever they run; it ends with the last of them. A step without any on
    this device is left out."""
    found, before = [], 0.0
    for asked, launched_until in steps:
        mine = [kernel for launched, kernel in kernels if asked <= launched < launched_until]
        if not mine:
            continue
        start, end = max(before, asked), max(span(kernel)[1] for kernel in mine)
        kinds = {"compute": [], "copy": [], "call": []}
        for kernel in mine:
            ranks = kernel["args"].get("Process Group Ranks", "")
            kinds[kind_of(kernel["name"])].append((kernel["name"] + ranks, *span(kernel)))
        compute, copies = ([(begin, until) for _, begin, until in kinds[kind]] for kind in ("compute", "copy"))
        found.append(StepTrace(start, end, union(compute), numbered(kinds["call"]), copies + within(loading, start, end)))
        before = end
    return found


def kind_of(name: str) -> str:
    if "nccl" in name.lower() or "PtoP" in name:
        return "call"
    return "copy" if "HtoD" in name else "compute"


def within(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    return union(span for span in spans if start < span[1] and span[0] < end)


def numbered(calls: Iterable[tuple[str, float, float]]) -> list[Call]:
    seen: Counter[str] = Counter()
    result = []
    for name, start, end in sorted(calls, key=lambda call: call[1]):
        result.append(Call(name, seen[name], start, end))
        seen[name] += 1
    return result


def bytes_per_step(trace: dict[str, Any]) -> float | None:
    """What a rank hands to collectives and sends, in bytes a step: all of it to an all-reduce, its share to a gather. None
    where the trace does not say: neither a CUDA graph's replay nor nn.DataParallel's calls of NCCL name sizes."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launched = launches(events)
    sent = [
        (launched.get(event["args"].get("correlation"), event["ts"]), bytes_of(event)) for event in events if bytes_of(event)
    ]
    each = [sum(size for ts, size in sent if start <= ts < end) for start, end in host_ranges(events, STEP)]
    named = any(event["name"] == "record_param_comms" for event in events)
    if not named and any("nccl" in event["name"].lower() for event in events):
        return None
    return statistics.median(each)  # of no step in which the ranks also agreed on something


def bytes_of(event: dict) -> float:
    """That this event says a rank hands in."""
    details = event.get("args", {})
    if event["name"].startswith("gloo:") and "recv" not in event["name"]:
        given = zip(details.get("Input Dims", []), details.get("Input type", []), strict=True)
        return sum(count(dims) * element(kind) for dims, kind in given)
    if event["name"] == "record_param_comms" and "recv" not in details.get("Collective name", ""):
        return details.get("In msg nelems", 0) * element(details.get("dtype", ""))
    return details.get("bytes", 0) if event["cat"] == "gpu_memcpy" and "PtoP" in event["name"] else 0


def count(dims: list) -> int:
    """Elements of a tensor or of a list of tensors."""
    if dims and isinstance(dims[0], list):
        return sum(count(inner) for inner in dims)
    product = 1
    for size in dims:
        product *= size
    return product if dims else 0


def element(kind: str) -> int:
    return ELEMENT_BYTES.get(kind.lower(), 1)


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
