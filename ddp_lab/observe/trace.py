"""Reader of one rank's torch.profiler trace (Chrome's format): what its devices did, and what it sent, in each step."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

STEP, DATA = "ddp_lab step", "ddp_lab data"  # the names of the record_function ranges that `Profiled` adds to a trace

Span = tuple[float, float]  # start and end, in microseconds
Event = dict[str, Any]  # an event of the trace, as JSON


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


def read(trace: dict[str, Any]) -> dict[str, list[StepTrace]]:
    """Return the steps of every device of a rank, by the device's name. `trace` is the content of the trace file."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    steps, loading = spans_of_steps(events), host_ranges(events, DATA)
    if not kernels:
        return {"cpu": read_cpu(events, steps, loading)}
    by_device: defaultdict[int, list[tuple[float, Event]]] = defaultdict(list)
    # A kernel and the host's call that launched it have the same correlation id.
    calls = [event for event in events if event["cat"] in ("cuda_runtime", "cuda_driver")]
    launched = {call["args"]["correlation"]: call["ts"] for call in calls}
    for kernel in kernels:
        device = kernel["args"].get("device", kernel["pid"])  # a copy between devices has no device in its args
        by_device[device].append((launched.get(kernel["args"].get("correlation"), -1.0), kernel))
    return {f"cuda:{device}": read_gpu(mine, steps, loading) for device, mine in sorted(by_device.items())}


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


def read_cpu(events: list[Event], steps: list[Span], loading: list[Span]) -> list[StepTrace]:
    """Return the steps of the CPU. Operations of ATen count as compute, those of gloo as communication."""
    compute = [span(event) for event in events if event["cat"] == "cpu_op" and event["name"].startswith("aten::")]
    calls = [
        (f"{event['name']} {event['args'].get('Input Dims')}", *span(event))
        for event in events
        if event["name"].startswith("gloo:")
    ]
    found: list[StepTrace] = []
    for asked, end in steps:
        inside = [call for call in calls if asked <= call[1] < end]
        found.append(StepTrace(asked, end, within(compute, asked, end), numbered(inside), within(loading, asked, end)))
    return found


def read_gpu(kernels: list[tuple[float, Event]], steps: list[Span], loading: list[Span]) -> list[StepTrace]:
    """Return the steps of one GPU.

    The kernels of a step are those that the host launched in it, even if they run later. The step ends with the last of them.
    A step without a kernel on this GPU is left out.

    Args:
        kernels: the GPU's kernels, each with the time of its launch.
        steps: the host's steps.
        loading: the times in which the loader worked.
    """
    found: list[StepTrace] = []
    before = 0.0
    for asked, launched_until in steps:
        mine = [kernel for launched, kernel in kernels if asked <= launched < launched_until]
        if not mine:
            continue
        start, end = max(before, asked), max(span(kernel)[1] for kernel in mine)
        kinds: dict[str, list[tuple[str, float, float]]] = {"compute": [], "copy": [], "call": []}
        for kernel in mine:
            ranks = kernel["args"].get("Process Group Ranks", "")
            kinds[kind_of(kernel["name"])].append((kernel["name"] + ranks, *span(kernel)))
        compute, copies = ([(begin, until) for _, begin, until in kinds[kind]] for kind in ("compute", "copy"))
        found.append(StepTrace(start, end, union(compute), numbered(kinds["call"]), copies + within(loading, start, end)))
        before = end
    return found


def kind_of(name: str) -> str:
    """Return whether a kernel is communication (`call`), a copy from the host (`copy`) or `compute`."""
    if "nccl" in name.lower() or "PtoP" in name:
        return "call"
    return "copy" if "HtoD" in name else "compute"


def within(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """Return the spans that overlap with [start, end], merged."""
    return union(span for span in spans if start < span[1] and span[0] < end)


def numbered(calls: Iterable[tuple[str, float, float]]) -> list[Call]:
    """Return the calls in the order of their starts, each with its number among the calls of its name."""
    seen: Counter[str] = Counter()
    result: list[Call] = []
    for name, start, end in sorted(calls, key=lambda call: call[1]):
        result.append(Call(name, seen[name], start, end))
        seen[name] += 1
    return result
