"""metrics.jsonl: one record per epoch, in JSON, and the curves that are drawn from it."""

import json
import os
from pathlib import Path

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


def drop_epochs(metrics: Path, start_epoch: int) -> None:
    """Remove the records of `start_epoch` and later epochs.

    An interrupted launch wrote them after the checkpoint from which the run resumes. The last record may be incomplete.
    """
    if metrics.exists():
        complete = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
        rest = metrics.with_suffix(".tmp")
        rest.write_text("".join(line for line in complete if json.loads(line)["epoch"] < start_epoch))
        rest.replace(metrics)


def draw_metrics(metrics: Path, picture: Path) -> None:
    """Draw the losses and accuracies of metrics.jsonl by epoch. Draw nothing if there is no record."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    plots: list[Plot] = []
    for kind in ("loss", "accuracy") if records else ():
        lines: list[Curve] = []
        for part in ("train", "test"):
            points = [(r["epoch"], r[f"{part}_{kind}"]) for r in records if r[f"{part}_{kind}"] is not None]
            lines += [Curve(part, points)] if points else []
        plots += [curves(f"{metrics.parent.name}: {kind}", "epoch", kind, lines, zero=kind == "loss")] if lines else []
    if plots:
        beside(plots, picture)
