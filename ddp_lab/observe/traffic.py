"""The bytes that a rank sends in a step, from its torch.profiler trace."""

import statistics
from typing import Any

from ddp_lab.observe.trace import STEP, Event, host_ranges, launches

ELEMENT_BYTES = {"double": 8, "long": 8, "long int": 8, "float": 4, "int": 4, "bfloat16": 2, "c10::bfloat16": 2, "half": 2}


def bytes_per_step(trace: dict[str, Any]) -> float | None:
    """Return the bytes per step that a rank passes to collectives and sends.

    For an all-reduce these are the bytes of the whole tensor, for a gather those of the rank's own shard.

    Returns:
        The median over the steps; None if the trace has no sizes. A CUDA graph's replay and the NCCL calls of nn.DataParallel
        record none.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launched = launches(events)
    sent = [
        (launched.get(event["args"].get("correlation"), float(event["ts"])), size)
        for event in events
        if (size := bytes_of(event))
    ]
    each = [sum(size for ts, size in sent if start <= ts < end) for start, end in host_ranges(events, STEP)]
    named = any(event["name"] == "record_param_comms" for event in events)
    if not named and any("nccl" in event["name"].lower() for event in events):
        return None
    return statistics.median(each)  # the median excludes steps in which the ranks also agreed on a decision


def bytes_of(event: Event) -> float:
    """Return the bytes that a rank passes to the communication call of this event; 0 for other events."""
    details = event.get("args", {})
    if event["name"].startswith("gloo:") and "recv" not in event["name"]:
        given = zip(details.get("Input Dims", []), details.get("Input type", []), strict=True)
        return sum(count(dims) * element(kind) for dims, kind in given)
    if event["name"] == "record_param_comms" and "recv" not in details.get("Collective name", ""):
        return details.get("In msg nelems", 0) * element(details.get("dtype", ""))
    return details.get("bytes", 0) if event["cat"] == "gpu_memcpy" and "PtoP" in event["name"] else 0


def count(dims: list[Any]) -> int:
    """Return the number of elements of a tensor with these dimensions, or of a list of tensors."""
    if dims and isinstance(dims[0], list):
        return sum(count(inner) for inner in dims)
    product = 1
    for size in dims:
        product *= size
    return product if dims else 0


def element(kind: str) -> int:
    """Return the bytes of an element of this type, by its name in a trace."""
    return ELEMENT_BYTES.get(kind.lower(), 1)
