"""Plans as a table, as JSON, as a picture, and as one page of HTML."""

import html
import io
from typing import Any

from ddp_lab.advise.advisor import Advisor, Row
from ddp_lab.advise.devices import GiB
from ddp_lab.advise.live import STATE
from ddp_lab.observe.plot import Plot, figure, short, stacked, timeline

PLANNED = (
    "strategy",
    "GPUs",
    "GiB/GPU",
    "state",
    "activations",
    "others",
    "sent/step",
    "FLOPs/step",
    "step takes at least",
)
MEASURED = {
    "images/s": ("images_per_second", ",.0f"),
    "MFU": ("mfu", ".1%"),
    "exposed": ("exposed", ".0%"),
}
# of memory that torch allocates, without CUDA and NCCL
PEAKS = ("torch's peak: planned", "measured")
PASSES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
PAGE = """<!doctype html>
<html lang=en><meta charset=utf-8><title>What a run needs</title>
<style>
body {{font-family: sans-serif}}
pre {{overflow-x: auto}}
svg {{max-width: 100%; height: auto}}
</style>
<h1>What a run needs</h1>
<pre>{table}</pre>
{picture}</html>
"""


def head(advisor: Advisor) -> list[str]:
    """Return lines that describe the run and the devices."""
    devices = advisor.devices
    memory = f" ({devices.memory / GiB:.1f} GiB)" if devices.memory < float("inf") else ""
    nodes = f" on each of {devices.nodes} machines" if devices.nodes > 1 else ""
    images = "x".join(map(str, advisor.dataset.train.shape))
    parameters = sum(tensor.numel() for tensor in advisor.model.parameters())
    return [
        f"{devices.per_node} x {devices.name}{memory}{nodes}; {parameters:,} parameters, images "
        f"{images}, batch_size={advisor.batch_size}, {advisor.precision}",
        "Planned by real steps on fake tensors. Memory is that of eager execution, at least what a "
        "compiled step needs.",
    ]


def table(advisor: Advisor) -> str:
    """Return the plans as lines of text, and the recommendation.

    The memory of a strategy is that of its fullest device.
    """
    measured = any(row.measured for row in advisor.rows)
    rows = [
        (*PLANNED, *((*MEASURED, *PEAKS) if measured else ()), ""),
        *(cells(row, measured) for row in advisor.rows),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, between, widths[1:-1]), last])
        for first, *between, last in rows
    ]
    lines = [*head(advisor), "", *(line.rstrip() for line in lines), *advisor.notes, ""]
    return "\n".join([*lines, advisor.conclusion])


def cells(row: Row, measured: bool) -> tuple[str, ...]:
    """Return the cells of a row, with or without what was measured."""
    plan = row.fullest
    state = sum(plan.peak[kind] for kind in STATE)
    activations = plan.peak["activations"]
    sent = max(sum(each.sent.values()) for each in row.plans)
    flops = max(each.flops for each in row.plans)
    measured_cells = [
        format(row.measured[key], form) if key in row.measured else ""
        for key, form in MEASURED.values()
    ]

    if "allocated" in row.measured:
        measured_cells += [gib(plan.allocated), gib(row.measured["allocated"])]
    else:
        measured_cells += [""] * len(PEAKS)
    return (
        *(row.name, str(row.devices)),
        *map(gib, (plan.total, state, activations, plan.total - state - activations)),
        *(f"{short(float(f'{sent:.3g}'))}B", short(float(f"{flops:.3g}"))),
        "" if row.bound is None else f"{1000 * row.bound:,.3g} ms",
        *(measured_cells if measured else ()),
        "" if row.fits else "does not fit",
    )


def gib(size: float) -> str:
    """Return a number of bytes in GiB, with more digits if two would be zeros."""
    return f"{size / GiB:,.{2 if size == 0 or size >= 0.005 * GiB else 4}f}"


def as_json(advisor: Advisor) -> dict[str, Any]:
    """Return the plans as plain values by attribute: bytes, seconds and FLOPs."""
    rows: list[dict[str, Any]] = []
    for row in advisor.rows:
        rows.append(vars(row) | {"name": row.name, "plans": []})
        for plan in row.plans:
            values: dict[str, Any] = plan._asdict() | {
                "allocated": plan.allocated,
                "total": plan.total,
            }
            values["held"] = values.pop("state_bytes")  # the file keeps its keys
            sent = values.pop("sent")
            values["collectives"] = [
                {
                    "name": group.name,
                    "ranks": len(group.ranks),
                    "crosses_machines": advisor.devices.crosses(group.ranks),
                }
                | {"calls": calls, "bytes_sent": sent[group]}
                for group, calls in values.pop("calls").items()
            ]
            rows[-1]["plans"].append(values)

    recommended = advisor.ranked[0].overrides if advisor.ranked else None
    return {
        "own": advisor.chosen,
        "notes": advisor.notes,
        "conclusion": advisor.conclusion,
        "head": head(advisor),
        "rows": rows,
        "recommended": recommended,
    }


def memory_plot(advisor: Advisor, row: Row | None = None) -> Plot:
    """Return stacked bars of memory, and a line at that of a device.

    There is a bar for each strategy, or for each rank or device of one.
    """
    if row is None:
        title = "Planned peak memory of a GPU, by strategy"
        plans = {row.name: row.fullest for row in advisor.rows}
    else:
        title = f"{row.name}, by rank"
        plans = {
            f"device {plan.place}" if row.ranks == 1 else f"rank {plan.rank}": plan
            for plan in row.plans
        }
    bars = {name: plan.peak | {"CUDA and NCCL": plan.outside} for name, plan in plans.items()}
    bars = {
        name: {part: size / GiB for part, size in parts.items()} for name, parts in bars.items()
    }
    limit = advisor.devices.memory / GiB
    return stacked(title, "GiB", bars, limit=limit, limit_label="memory of a GPU")


def page(advisor: Advisor) -> str:
    """Return one page of HTML that loads nothing.

    It has the table, the memory by rank and part, and the schedules of pipelines.
    """
    from matplotlib import rc_context

    plots = [memory_plot(advisor)]
    for row in (row for row in advisor.rows if len(row.plans) > 1):
        plots.append(memory_plot(advisor, row))
        slots = {
            f"rank {rank}": [
                (start, start + length, PASSES[kind], str(number))
                for start, length, kind, number in boxes
            ]
            for rank, boxes in row.plans[0].order.items()
        }
        if slots:
            title = f"{row.name}: a step, if stages are equal and backward takes twice as long"
            plots.append(timeline(title, "time slots of a forward pass", slots))

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):  # text remains text
        figure(plots).savefig(file, format="svg")
    picture = file.getvalue()
    return PAGE.format(table=html.escape(table(advisor)), picture=picture[picture.index("<svg") :])
