"""Plans as a table, as JSON and as a picture."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_lab.advise.advisor import Advice, Refused, Row
from ddp_lab.advise.machine import GiB
from ddp_lab.advise.plan import HELD, Planned
from ddp_lab.observe.figure import short
from ddp_lab.observe.plot import GREY, Plot, beside, stacked

COLUMNS = ("strategy", "GPUs", "GiB/GPU", "state", "activations", "others", "sent/step", "FLOPs/step", "step takes at least")
MEASURED = ("images/s", "MFU", "exposed", "GiB measured")


def table(advice: Advice) -> str:
    """Return the plans as lines of text, and the recommendation below them."""
    measured = any(row.measured for row in advice.rows)
    rows = [(*COLUMNS, *(MEASURED if measured else ()), ""), *(cells(row, measured) for row in advice.rows)]
    own = [f"your strategy: {name}" for row in advice.rows if row.overrides == advice.own for name in [row.name]]
    lines = [*advice.head, "", *aligned(rows), *advice.notes, *own, *refusals(advice.refused), "", *parts(advice.rows), ""]
    return "\n".join([*lines, advice.conclusion])


def cells(row: Row, measured: bool) -> tuple[str, ...]:
    """Return the cells of a plan; the memory is that of the fullest GPU."""
    plan = row.fullest
    state = sum(plan.peak[kind] for kind in HELD)
    sizes = plan.total, state, plan.peak["activations"], plan.total - state - plan.peak["activations"]
    note = "" if row.fits else "does not fit"
    note += f"{' and' if note else ''} + {gib(plan.host)} GiB a rank in host memory" if plan.host else ""
    found = row.measured
    more = () if not measured else ("",) * 4
    if found:
        more = (
            f"{found['images_per_second']:,.0f}",
            "" if found["mfu"] is None else f"{found['mfu']:.1%}",
            "" if found["exposed"] is None else f"{found['exposed']:.0%}",
            "" if found["peak"] is None else gib(found["peak"]),
        )
    return (
        row.name,
        str(row.devices),
        *map(gib, sizes),
        f"{short(float(f'{max(sum(each.sent.values()) for each in row.plans):.3g}'))}B",
        short(float(f"{max(each.flops for each in row.plans):.3g}")),
        "" if row.bound is None else f"{1000 * row.bound:,.3g} ms",
        *more,
        note,
    )


def refusals(refused: Sequence[Refused]) -> list[str]:
    """Return what is refused or cannot be planned, with each reason once."""
    groups = dict[str, list[str]]()
    for each in refused:
        groups.setdefault(each.reason, []).append(each.name)
    return [f"{', '.join(names)}: {reason}" for reason, names in groups.items()]


def parts(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table of the parts of the peak, and of what a step sends, of the fullest GPU."""
    kinds = [kind for kind in rows[0].fullest.peak if any(row.fullest.peak[kind] for row in rows)]
    outside = ("CUDA and NCCL",) if rows[0].fullest.outside else ()
    lines = [("GiB at the peak", *kinds, *outside, "collectives of a step")]
    for row in rows:
        plan = row.fullest
        sizes = [*(plan.peak[kind] for kind in kinds), *(plan.outside for _ in outside)]
        lines.append((row.name, *map(gib, sizes), collectives(plan)))
    return aligned(lines)


def collectives(plan: Planned) -> str:
    """Return the collectives of a step by kind and size of the group."""
    return ", ".join(f"{calls} {group.name} of {len(group.ranks)} ranks" for group, calls in plan.calls.items()) or "none"


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines of text: the first and the last column aligned to the left, all others to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [
        "  ".join([f"{first:<{widths[0]}}", *map(str.rjust, between, widths[1:-1]), last]) for first, *between, last in rows
    ]
    return [line.rstrip() for line in lines]


def gib(size: float) -> str:
    """Return a number of bytes in GiB, with more digits if two would be zeros."""
    if size == 0 or size >= 0.005 * GiB:
        return f"{size / GiB:,.2f}"
    return f"{size / GiB:.4f}" if size >= 1e-4 * GiB else "<0.0001"


def as_json(advice: Advice) -> dict[str, Any]:
    """Return the plans as plain values: bytes, seconds and FLOPs."""
    return {
        "head": advice.head,
        "own": advice.own,
        "rows": [row_as_json(advice, row) for row in advice.rows],
        "refused": [asdict(refused) for refused in advice.refused],
        "notes": advice.notes,
        "recommended": advice.ranked[0].overrides if advice.ranked else None,
        "conclusion": advice.conclusion,
    }


def row_as_json(advice: Advice, row: Row) -> dict[str, Any]:
    """Return a plan as plain values."""
    ranks = [
        {name: value for name, value in plan._asdict().items() if name not in ("calls", "sent")}
        | {"allocated": plan.allocated, "total": plan.total}
        | {
            "collectives": [
                {
                    "name": group.name,
                    "ranks": len(group.ranks),
                    "first_ranks": group.ranks[:2],
                    "crosses_machines": advice.machine.crosses(group.ranks),
                    "calls": calls,
                    "bytes_sent": plan.sent[group],
                }
                for group, calls in plan.calls.items()
            ]
        }
        for plan in row.plans
    ]
    return {
        "overrides": row.overrides,
        "devices": row.devices,
        "fits": row.fits,
        "fullest": row.plans.index(row.fullest),
        "ranks": ranks,
        "images": row.images,
        "step_seconds_at_least": row.bound,
        "launch": row.launch,
        "measured": row.measured,
    }


def draw(advice: Advice, path: Path) -> None:
    """Draw the memory of the strategies against the card's memory."""
    beside([memory_plot(advice.rows)], path)


def memory_plot(rows: Sequence[Row]) -> Plot:
    """Return stacked bars of the memory of each plan, and a line at the card's memory."""
    bars = {row.name: {kind: size / GiB for kind, size in sizes_of(row.fullest).items()} for row in rows}
    plot, memory = stacked("Planned peak memory of a GPU; the line is the card's memory", "GiB", bars), rows[0].memory / GiB

    def with_line(axes: Any) -> None:
        plot.draw(axes)
        if memory < float("inf"):
            axes.axvline(memory, color=GREY, linestyle="--")
            axes.set_xlim(0, max(axes.get_xlim()[1], 1.05 * memory))

    return plot._replace(draw=with_line)


def sizes_of(plan: Planned) -> dict[str, float]:
    """Return the parts of the memory, with what torch does not count."""
    return plan.peak | {"CUDA and NCCL": plan.outside}
