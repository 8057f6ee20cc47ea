"""Reader of one rank's torch.profiler trace (Chrome's format): what its devices did, and what it sent, in each step."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

STEP, DATA = "ddp_lab step", "ddp_lab data"  # the names of the record_function ranges that `Profiled` adds to a trace

Span = tuple[float, float]  # start and end, in microseconds
Event = dict[str, Any]  # an event of the trace, as JSON


class Activity(NamedTuple):
    """What a device did: `compute`, a `copy` from the host, or a `call` for communication. Times are in microseconds."""

    kind: str
    name: str
    launched: float
    start: float
    end: float


class Call(NamedTuple):
    """One rank's part in a collective or in a message.

    Attributes:
        name: name of the kernel or operation.
        number: index among the calls of this name in the step, from 0.
        start, end: in microseconds.
    """

    name: str
    number: int
    start: float
    end: float


class StepTrace(NamedTuple):
    """The activities of one device in one step. Times are in microseconds of the rank's own clock.

    Attributes:
        start, end: of the step.
        compute: when the device computed.
        calls: its collectives and messages.
        data: when the loader worked, or a copy from the host was in progress.
    """

    start: float
    end: float
    compute: list[Span]
    calls: list[Call]
    data: list[Span]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint spans, in order, that cover the same times."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def span(event: Event) -> Span:
    """Return the start and end of an event, in microseconds."""
    return event["ts"], event["ts"] + event["dur"]


def host_ranges(events: list[Event], name: str) -> list[Span]:
    """Return the ranges of this name on the host. The trace also has ranges of the same name on the GPU."""
    return sorted(span(event) for event in events if event["name"] == name and event["cat"] == "user_annotation")


def spans_of_steps(events: list[Event]) -> list[Span]:
    """Return the start and end of every step by the host's clock.

    A step begins when its batch is requested. The time between the last step of an epoch and the first step of the next epoch
    belongs to no step. It includes the request that finds the loader exhausted.
    """
    found: list[Span] = []
    before, loading = 0.0, host_ranges(events, DATA)
    for start, end in host_ranges(events, STEP):
        asked = [begin for begin, until in loading if before <= begin and until <= start]
        found.append((asked[-1] if asked else start, end))
        before = end
    return found


def read(trace: dict[str, Any]) -> dict[str, list[StepTrace]]:
    """Return the steps of every device of a rank, by the device's name. `trace` is the content of the trace file.

    On the CPU, operations of ATen count as compute, those of gloo as communication. A rank that uses GPUs has no row for it.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    host, by_gpu = list[Activity](), defaultdict[int, list[Activity]](list)
    # A kernel and the host's call that launched it have the same correlation id.
    calls = [event for event in events if event["cat"] in ("cuda_runtime", "cuda_driver")]
    launched = {call["args"]["correlation"]: call["ts"] for call in calls}
    for event in events:
        name, category, args, (start, end) = event["name"], event["cat"], event.get("args", {}), span(event)
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kind = "call" if "nccl" in name.lower() or "PtoP" in name else "copy" if "HtoD" in name else "compute"
            at = launched.get(args.get("correlation"), -1.0)
            gpu = args.get("device", event["pid"])  # a copy between devices has no device in its args
            by_gpu[gpu].append(Activity(kind, name + args.get("Process Group Ranks", ""), at, start, end))
        elif category == "cpu_op" and name.startswith("aten::"):
            host.append(Activity("compute", name, start, start, end))
        elif name.startswith("gloo:"):
            host.append(Activity("call", f"{name} {args.get('Input Dims')}", start, start, end))
    steps, loading = spans_of_steps(events), host_ranges(events, DATA)
    if not by_gpu:
        return {"cpu": read_steps(host, steps, loading, on_host=True)}
    return {f"cuda:{gpu}": read_steps(mine, steps, loading, on_host=False) for gpu, mine in sorted(by_gpu.items())}


def read_steps(activities: list[Activity], steps: list[Span], loading: list[Span], on_host: bool) -> list[StepTrace]:
    """Return the steps of one device.

    A step of a GPU consists of the kernels that the host launched in it, even if they run later, and ends with the last of
    them; a step without a kernel on this GPU is left out.

    Args:
        activities: of the device.
        steps: the host's steps.
        loading: the times in which the loader worked.
        on_host: whether the device is the CPU.
    """
    found: list[StepTrace] = []
    before = 0.0
    for asked, until in steps:
        mine = sorted((each for each in activities if asked <= each.launched < until), key=lambda each: each.start)
        if not mine and not on_host:
            continue
        start, end = max(before, asked), until if on_host else max(each.end for each in mine)
        seen, calls = Counter[str](), list[Call]()
        for each in mine:
            if each.kind == "call":
                calls.append(Call(each.name, seen[each.name], each.start, each.end))
                seen[each.name] += 1
        compute, copies = (union((each.start, each.end) for each in mine if each.kind == kind) for kind in ("compute", "copy"))
        data = union([*copies, *(each for each in loading if start < each[1] and each[0] < end)])
        found.append(StepTrace(start, end, compute, calls, data))
        before = end
    return found
