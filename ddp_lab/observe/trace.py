"""What torch.profiler's trace (Chrome's format) of one rank says of its steps: what its devices did when, the bytes it sent."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

STEP, DATA = "ddp_lab step", "ddp_lab data"  # the ranges that a trace must have
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


def read(trace: dict[str, Any]) -> dict[str, list[StepTrace]]:
    """The steps of every device."""
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
        (launched.get(event["args"].get("correlation"), event["ts"]), size) for event in events if (size := bytes_of(event))
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
