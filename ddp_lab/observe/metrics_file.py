"""metrics.jsonl: one JSON object per line, which its key `kind` describes, and what is read and drawn from it.

"epoch": the metrics after an epoch. Versions up to 2026-11 wrote no other rows, and these without `kind` and `step`.
"step": the metrics of a training step.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_lab.config.types import SETS
from ddp_lab.observe.plot import Curve, Plot, beside, curves


def append_line(path: Path, line: str) -> None:
    """Append a line to a file completely or, on a full disk, not at all.

    Raises:
        OSError: the line could not be written completely.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
    try:
        size, text = os.fstat(descriptor).st_size, f"{line}\n".encode()
        if (written := os.write(descriptor, text)) < len(text):
            os.truncate(descriptor, size)
            raise OSError(f"only {written} of {len(text)} bytes were written")
    finally:
        os.close(descriptor)


def is_epoch(row: dict[str, Any]) -> bool:
    """Return whether a row holds the metrics after an epoch."""
    return row.get("kind", "epoch") == "epoch"


def read_epochs(metrics: Path) -> list[dict[str, Any]]:
    """Return the rows of the epochs; none if there is no file. A row that is just being written is left out."""
    return [row for row in map(json.loads, complete_lines(metrics)) if is_epoch(row)]


def complete_lines(metrics: Path) -> list[str]:
    """Return the lines of the file, but for an incomplete last one; none if there is no file."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [line for line in lines if line.endswith("\n")]


def drop_rows(metrics: Path, epoch: int, step: int) -> None:
    """Remove the rows after the position from which a run resumes, which an interrupted launch wrote.

    Args:
        metrics: the file.
        epoch: first epoch that will be recorded.
        step: number of the last step that the run has taken.
    """

    def is_before(row: dict[str, Any]) -> bool:
        return row["epoch"] < epoch if is_epoch(row) else row["step"] <= step

    if metrics.exists():
        rest = metrics.with_suffix(".tmp")
        rest.write_text("".join(line for line in complete_lines(metrics) if is_before(json.loads(line))))
        rest.replace(metrics)


def objective(metrics: Path, choice: str) -> tuple[str, float | None]:
    """Return the result of a run for a sweeper: name and value of a metric, the best val_* or the last test_*.

    Args:
        metrics: the file.
        choice: the config's `optimize`.

    Returns:
        The value is None if no finite one was recorded.
    """
    rows = read_epochs(metrics)
    if choice == "auto":
        choice = "val_loss" if rows and "val_loss" in rows[-1] else "test_accuracy"
    values = [row[choice] for row in rows if row.get(choice) is not None and math.isfinite(row[choice])]
    if not values or choice.startswith("test"):
        return choice, values[-1] if values else None
    return choice, min(values) if choice == "val_loss" else max(values)


def describe_metrics(row: Mapping[str, Any], sets: Sequence[str] = SETS) -> str:
    """Return the losses and accuracies in a row, as "train loss 0.1234 accuracy 0.9876 | val loss ..."."""
    parts: list[str] = []
    for name in sets:
        found = [f"{kind} {value:.4f}" for kind in ("loss", "accuracy") if (value := row.get(f"{name}_{kind}")) is not None]
        parts += [f"{name} {' '.join(found)}"] if found else []
    return " | ".join(parts)


def describe_result(metrics: Path, epoch: int, criterion: str | None, weights: Path, speed: str = "") -> str:
    """Return the line about the result of a run.

    Args:
        metrics: the file.
        epoch, criterion, weights: as in `Logger.summary`.
        speed: what follows the metrics.
    """
    row = next((row for row in read_epochs(metrics) if row["epoch"] == epoch), {})
    which = f"best {criterion}" if criterion else "last"
    return f"result: epoch {epoch} ({which}), {describe_metrics(row, SETS[1:]) or 'no metrics'}{speed} ({weights})"


def draw_metrics(metrics: Path, picture: Path) -> None:
    """Draw the losses and accuracies of metrics.jsonl by epoch. Draw nothing if there is no record."""
    records = read_epochs(metrics)
    plots: list[Plot] = []
    for kind in ("loss", "accuracy") if records else ():
        lines: list[Curve] = []
        for name in SETS:
            points = [(r["epoch"], r[f"{name}_{kind}"]) for r in records if r.get(f"{name}_{kind}") is not None]
            lines += [Curve(name, points)] if points else []
        plots += [curves(f"{metrics.parent.name}: {kind}", "epoch", kind, lines, zero=kind == "loss")] if lines else []
    if plots:
        beside(plots, picture)
