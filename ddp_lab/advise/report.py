"""Plans as a table, as JSON, as a picture, and as one page of HTML."""

import html
import io
import re
from pathlib import Path
from typing import Any

from ddp_lab.advise.advisor import Advisor, Row
from ddp_lab.advise.devices import GiB
from ddp_lab.advise.live import HELD
from ddp_lab.advise.plan import Planned
from ddp_lab.observe.plot import GREY, Plot, beside, figure, short, stacked, timeline

PLANNED = ("strategy", "GPUs", "GiB/GPU", "state", "activations", "others", "sent/step", "FLOPs/step", "step takes at least")
MEASURED = ("images/s", "MFU", "exposed", "torch's peak: planned", "measured")
PASSES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def head(advisor: Advisor) -> list[str]:
    """Return lines that describe the run and the devices."""
    cfg, devices = advisor.cfg, advisor.devices
    memory = f" ({devices.memory / GiB:.1f} GiB)" if devices.memory < float("inf") else ""
    nodes = f" on each of {devices.nodes} machines" if devices.nodes > 1 else ""
    images = "x".join(map(str, advisor.dataset.train.shape))
    parameters = sum(tensor.numel() for tensor in advisor.model.parameters())
    return [
        f"{devices.per_node} x {devices.name}{memory}{nodes}; {parameters:,} parameters, images {images}, "
        f"batch_size={cfg.batch_size}, {cfg.precision}",
        "Planned by real steps on fake tensors. Memory is that of eager execution, at least what a compiled step needs.",
    ]


def cells(advisor: Advisor) -> list[tuple[str, ...]]:
    """Return the rows of the table, with its header; the memory is that of the fullest device."""
    measured = any(row.measured for row in advisor.rows)
    found: list[tuple[str, ...]] = [(*PLANNED, *(MEASURED if measured else ()), "")]
    for row in advisor.rows:
        plan, note = row.fullest, "" if row.fits else "does not fit"
        state = sum(plan.peak[kind] for kind in HELD)
        if plan.host:
            note += f"{' and' if note else ''} + {gib(plan.host)} GiB a rank in host memory"
        sent, flops = max(sum(each.sent.values()) for each in row.plans), max(each.flops for each in row.plans)
        found.append(
            (
                *(row.name, str(row.devices)),
                *map(gib, (plan.total, state, plan.peak["activations"], plan.total - state - plan.peak["activations"])),
                *(f"{short(float(f'{sent:.3g}'))}B", short(float(f"{flops:.3g}"))),
                "" if row.bound is None else f"{1000 * row.bound:,.3g} ms",
                *(measurements(row) if measured else ()),
                note,
            )
        )
    return found


def measurements(row: Row) -> list[str]:
    """Return the cells of what was measured; torch's peak is that of memory it allocates, without CUDA and NCCL."""
    formats = {"images_per_second": "{:,.0f}", "mfu": "{:.1%}", "exposed": "{:.0%}"}
    shown = [form.format(row.measured[key]) if key in row.measured else "" for key, form in formats.items()]
    peaks = [row.fullest.allocated, row.measured["allocated"]] if "allocated" in row.measured else []
    return [*shown, *(map(gib, peaks) if peaks else ("", ""))]


def table(advisor: Advisor) -> str:
    """Return the plans as lines of text, and the recommendation below them."""
    rows = cells(advisor)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, between, widths[1:-1]), last]) for first, *between, last in rows
    ]
    lines = [*head(advisor), "", *(line.rstrip() for line in lines), *advisor.notes, *refusals(advisor), ""]
    return "\n".join([*lines, advisor.conclusion])


def refusals(advisor: Advisor) -> list[str]:
    """Return why strategies are not in the table, each reason once; of those that nobody chose the first sentence."""
    own, groups = " ".join(advisor.own).removeprefix("strategy="), dict[str, list[str]]()
    for name, reason in advisor.refused.items():
        brief = re.split(r"\. |, because|; ", re.sub(r"^strategy=\w+: ", "", reason))[0].split("\n")[0]
        groups.setdefault(reason if name == own else brief, []).append(name)
    return [f"not in the table: {', '.join(names)}: {reason}" for reason, names in groups.items()]


def gib(size: float) -> str:
    """Return a number of bytes in GiB, with more digits if two would be zeros."""
    if size == 0 or size >= 0.005 * GiB:
        return f"{size / GiB:,.2f}"
    return f"{size / GiB:.4f}" if size >= 1e-4 * GiB else "<0.0001"


def as_json(advisor: Advisor) -> dict[str, Any]:
    """Return the plans as plain values: bytes, seconds and FLOPs."""
    keys = ("name", "overrides", "devices", "images", "fits", "launch", "measured")
    rows = [
        {key: getattr(row, key) for key in keys}
        | {"step_seconds_at_least": row.bound, "ranks": [plan_as_json(advisor, plan) for plan in row.plans]}
        for row in advisor.rows
    ]
    recommended = advisor.ranked[0].overrides if advisor.ranked else None
    shown = {"head": head(advisor), "own": advisor.own, "rows": rows, "refused": advisor.refused, "notes": advisor.notes}
    return shown | {"recommended": recommended, "conclusion": advisor.conclusion}


def plan_as_json(advisor: Advisor, plan: Planned) -> dict[str, Any]:
    """Return a plan as plain values."""
    collectives = [
        {"name": group.name, "ranks": len(group.ranks), "crosses_machines": advisor.devices.crosses(group.ranks)}
        | {"calls": calls, "bytes_sent": plan.sent[group]}
        for group, calls in plan.calls.items()
    ]
    totals = {"allocated": plan.allocated, "total": plan.total, "collectives": collectives}
    return {name: value for name, value in plan._asdict().items() if name not in ("calls", "sent")} | totals


def draw(advisor: Advisor, path: Path) -> None:
    """Draw the memory of the strategies against that of a device."""
    beside([memory_plot(advisor, "Planned peak memory of a GPU", {row.name: row.fullest for row in advisor.rows})], path)


def memory_plot(advisor: Advisor, title: str, plans: dict[str, Planned]) -> Plot:
    """Return stacked bars of the parts of plans, and a line at the memory of a device."""
    bars = {name: plan.peak | {"CUDA and NCCL": plan.outside} for name, plan in plans.items()}
    plot = stacked(title, "GiB", {name: {part: size / GiB for part, size in parts.items()} for name, parts in bars.items()})
    memory = advisor.devices.memory / GiB

    def with_line(axes: Any) -> None:
        plot.draw(axes)
        if memory < float("inf"):
            axes.axvline(memory, color=GREY, linestyle="--")
            axes.set_xlim(0, max(axes.get_xlim()[1], 1.05 * memory))

    return plot._replace(draw=with_line)


def page(advisor: Advisor) -> str:
    """Return one page of HTML that loads nothing: the table, the memory by rank and part, and the schedules of pipelines."""
    from matplotlib import rc_context

    plots = [memory_plot(advisor, "Planned peak memory of a GPU, by strategy", {row.name: row.fullest for row in advisor.rows})]
    for row in (row for row in advisor.rows if len(row.plans) > 1):
        places = {f"device {plan.place}" if row.ranks == 1 else f"rank {plan.rank}": plan for plan in row.plans}
        plots.append(memory_plot(advisor, f"{row.name}, by rank", places))
        if slots := row.plans[0].order:
            plots.append(schedule_plot(f"{row.name}: a step, if stages are equal and backward takes twice as long", slots))
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):  # text remains text
        figure(plots).savefig(file, format="svg")
    picture = file.getvalue()
    rows = [tuple(html.escape(cell) for cell in row) for row in cells(advisor)]
    lines = [
        "".join(f"<{tag}>{cell}</{tag}>" for cell in row) for tag, row in zip(["th"] + ["td"] * len(rows), rows, strict=False)
    ]
    above, below = head(advisor), [*advisor.notes, *refusals(advisor), advisor.conclusion]
    style = "body{font:15px sans-serif;margin:2em}td,th{padding:.3em .8em;text-align:right}td{border-top:1px solid #ddd}"
    style += (
        "td:first-child,th:first-child,td:last-child{text-align:left}svg{max-width:100%;height:auto}p{white-space:pre-wrap}"
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>What a run needs</title><style>{style}</style>"
        f"<h1>What a run needs</h1>{''.join(f'<p>{html.escape(line)}</p>' for line in above)}"
        f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
        f"{''.join(f'<p>{html.escape(line)}</p>' for line in below)}{picture[picture.index('<svg') :]}</html>\n"
    )


def schedule_plot(title: str, slots: dict[int, list[tuple[int, int, str, int]]]) -> Plot:
    """Return the timeline of a pipeline: a row for each rank, a box with its number for each pass of a micro-batch."""
    rows = {
        f"rank {rank}": [(start, start + length, PASSES[kind], str(number)) for start, length, kind, number in boxes]
        for rank, boxes in slots.items()
    }
    return timeline(title, "time slots of a forward pass", rows)
