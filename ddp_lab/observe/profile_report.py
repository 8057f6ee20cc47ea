"""The report of a profile: where the time of the recorded steps went, as a table, a picture, a diagnosis and summary.json."""

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from ddp_lab.observe.log import log
from ddp_lab.observe.logger import Logger
from ddp_lab.observe.plot import beside, stacked
from ddp_lab.observe.time_split import PARTS, diagnose, split_steps, summarise
from ddp_lab.observe.trace import Call, StepTrace, union


def report(ranks: list[dict[str, Any]], recorded: int, logger: Logger, folder: Path, graph: bool, bubble: float | None) -> None:
    """Log the report of all ranks, and write summary.json and, when the logger is closed, time_split.png.

    Args:
        ranks: a profile of each rank: `devices`, the steps of each of its devices; `peak_memory_bytes`; `bytes_per_step`.
        recorded: number of steps in a profile.
        logger: gets the table and the diagnosis.
        folder: directory of the files.
        graph: whether a step replays a CUDA graph.
        bubble: a pipeline's bubble by the formula, as a fraction of a step; None for other strategies.
    """
    rows = split_steps([{device: list(map(restore, steps)) for device, steps in rank["devices"].items()} for rank in ranks])
    for row in rows:
        row |= summarise(row)
    diagnosis = diagnose(rows, graph, bubble)
    kept = {key: [rank[key] for rank in ranks] for key in ("peak_memory_bytes", "bytes_per_step")}
    (folder / "summary.json").write_text(json.dumps({"rows": rows, "diagnosis": diagnosis, **kept}, indent=1))
    logger.draw_at_close(partial(draw, rows), folder / "time_split.png")
    text = table(rows)
    log.info(f"milliseconds of a step, the means of {recorded} (traces for ui.perfetto.dev: {folder})\n{text}")
    for line in diagnosis:
        log.info(line)
    logger.text("profile", f"```\n{text}\n```\n\n" + "\n\n".join(diagnosis))


def restore(step: list[Any]) -> StepTrace:
    """Return the StepTrace for its form in JSON, a list."""
    start, end, compute, calls, data = step
    return StepTrace(start, end, union(map(tuple, compute)), [Call(*call) for call in calls], union(map(tuple, data)))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the summarised rows as an aligned text table, times in milliseconds."""
    names = ("rank", "device", "step", *PARTS)
    lines = ["".join(f"{name:>{max(8, len(name) + 2)}}" for name in names)]
    for row in rows:
        cells = (row[name] if name in ("rank", "device") else f"{row[name]:.2f}" for name in names)
        lines.append("".join(f"{cell:>{max(8, len(name) + 2)}}" for name, cell in zip(names, cells, strict=True)))
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the summarised rows as stacked bars in a PNG file, `path`."""
    bars = {f"{row['rank']} {row['device']}": {part: row[part] for part in PARTS} for row in rows}
    beside([stacked("Where a step's time goes, by rank", "ms", bars)], path)


def mean_split(summary: dict[str, Any]) -> dict[str, float]:
    """Return the milliseconds of PARTS, averaged over all devices of a summary.json."""
    return {part: statistics.mean(row[part] for row in summary["rows"]) for part in PARTS}
