"""The report of a comparison: a table and the diagnoses, as Markdown and as one HTML file."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_lab.observe.figure import short
from scripts.comparison.runs import EARLY, Result

COLUMNS = (
    "strategy",
    "devices",
    "s/epoch",
    "samples/s",
    "speed-up",
    "efficiency",
    "memory a device",
    "sent a step",
    "test accuracy",
    f"difference after {EARLY} steps",
    "difference at the end",
)

NOTES = (
    f"difference: the largest difference of any weight from single's. After {EARLY} steps it is expected below 1e-6, as in the "
    "tests: strategies add the same float32 numbers in other orders, which rounds differently. Then it grows by a factor with "
    "every step, because each gradient depends on all weights, and by more with a larger learning rate (see the plot by step). "
    "Under BatchNorm each rank normalises its local batch, which is a different function (docs/strategies.md).",
    "throughput: the median of the epochs after the first, in which steps are profiled; for a run of one epoch, that epoch.",
    "memory: peak memory allocated on one GPU; without GPUs, peak resident size of one process, PyTorch included.",
)


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """Return the cells of the table as text. The row of a strategy that did not run ends with the reason."""
    single = results[0]
    table: list[tuple[str, ...]] = []
    for result in results:
        entry = result.entry
        if result.problem:
            table.append((entry.title, str(entry.devices), f"not run: {result.problem}"))
            continue
        speed_up = result.rate / single.rate if not single.problem else float("nan")
        found = {} if single.problem else result.differences(single)
        differences = [f"{found[step]:.1e}" if found else "" for step in ends(found)]
        table.append(
            (
                entry.title,
                str(entry.devices),
                f"{result.seconds:.2f}",
                f"{result.rate:,.0f}",
                f"{speed_up:.2f}",
                f"{speed_up / entry.devices:.0%}",
                *used(result.profile),
                f"{result.records[-1]['test_accuracy']:.4f}",
                *differences,
            )
        )
    return table


def ends(found: dict[int, float]) -> tuple[int, int]:
    """Return the last of the first steps, and the last step, of differences by step."""
    return max((step for step in found if step <= EARLY), default=0), max(found, default=0)


def headline(results: list[Result]) -> list[str]:
    """Return a line on how far the weights are from single's after the first steps and at the end; [] if it is unknown."""
    found = {} if results[0].problem else {r.name: r.differences(results[0]) for r in results[1:] if not r.problem}
    if not found:
        return []
    first, last = ends(next(iter(found.values())))
    worst, at_end = (max(found, key=lambda name: found[name][step]) for step in (first, last))
    return [
        f"Largest difference of a weight from single's after {first} steps: {found[worst][first]:.1e} ({worst}); without "
        f"BatchNorm it is expected below 1e-6. Rounding grows in training: {found[at_end][last]:.1e} after {last} ({at_end})."
    ]


def used(profile: dict[str, Any] | None) -> tuple[str, str]:
    """Return peak memory and bytes sent per step as text."""
    if profile is None:
        return "not measured", "not measured"
    sent = profile["bytes_per_step"]
    return (
        f"{max(profile['peak_memory_bytes']) / 2**20:,.0f} MiB",
        "not measured" if None in sent else f"{short(float(f'{max(sent):.3g}'))}B",
    )


def diagnoses(results: list[Result]) -> list[str]:
    """Return the diagnosis of each profiled run as one line."""
    return [f"{result.name}: {'. '.join(result.profile['diagnosis'])}" for result in results if result.profile]


def html_row(tag: str, row: Sequence[str]) -> str:
    """Return a row of an HTML table. If the row has too few cells, the last one spans the missing columns."""
    *cells, last = (f">{html.escape(cell)}</{tag}>" for cell in row)
    missing = len(COLUMNS) - len(row)
    wide = f" colspan={missing + 1} style='text-align:left'" if missing else ""
    return f"<tr>{''.join(f'<{tag}{cell}' for cell in cells)}<{tag}{wide}{last}</tr>"


def report(table: list[tuple[str, ...]], head: list[str], diagnosis: list[str], out: Path) -> str:
    """Write report.md and report.html.

    Args:
        table: the cells of the table, without the header.
        head: lines above the table.
        diagnosis: lines below the table.
        out: directory of the report and of plots.png.

    Returns:
        The text of report.md.
    """
    text = "\n".join(
        [
            "# Every strategy on the same work",
            "",
            *head,
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|---" * len(COLUMNS) + "|",
            *("| " + " | ".join([*row, *[""] * (len(COLUMNS) - len(row))]) + " |" for row in table),
            "",
            *(f"- {line}" for line in diagnosis),
            "",
            *(f"*{note}*\n" for note in NOTES),
            "![accuracy and speed](plots.png)",
            "",
        ]
    )
    (out / "report.md").write_text(text)
    picture = base64.b64encode((out / "plots.png").read_bytes()).decode()
    cells = "".join(html_row(tag, row) for tag, row in [("th", COLUMNS), *(("td", row) for row in table)])
    style = "body{font:15px sans-serif;margin:2em;max-width:80em}td,th{padding:.3em .8em;text-align:right}"
    style += "td{border-top:1px solid #ddd}td:first-child,th:first-child{text-align:left}img{max-width:100%}"
    (out / "report.html").write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Every strategy on the same work</title><style>{style}</style>"
        f"<h1>Every strategy on the same work</h1>{''.join(f'<p>{html.escape(line)}</p>' for line in head)}"
        f"<table>{cells}</table><ul>{''.join(f'<li>{html.escape(line)}' for line in diagnosis)}</ul>"
        f"{''.join(f'<p><i>{html.escape(note)}</i></p>' for note in NOTES)}"
        f"<p><img alt='accuracy and speed' src='data:image/png;base64,{picture}'></p></html>"
    )
    return text
