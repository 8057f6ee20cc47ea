"""metrics.jsonl: one JSON object per line of a `kind`, and what is read and drawn from it.

"epoch": the metrics after an epoch. Versions up to 2026-11 wrote no other rows, and these without
`kind` and `step`. "step": the metrics of a training step. "evaluation": those of an evaluation
within an epoch. "straggler": a rank that has become slow, or has recovered.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ddp_lab.config.types import SETS
from ddp_lab.observe.log import log
from ddp_lab.observe.plot import Curve, Plot, beside, curves

OTHERS = (
    "epoch",
    "step",
    "lr",
    "samples_per_second",
    "data_wait",
    "peak_memory_MiB",
    "mfu",
    "eta_epoch",
    "eta",
)
STRAGGLER = "straggler"  # the kind of row that has no metrics
OF_STEP = "step/"  # before the names that trackers get of the metrics of a step
OF_STEPS = ("step", STRAGGLER)  # kinds of rows that are written between steps
# of the metrics of a set, those that the log and the curves do not have
HIDDEN = ("top5_accuracy",)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row completely or, on a full disk, which is logged and not raised, not at all.

    null stands for numbers that are not finite, which JSON has not.
    """
    line = f"{json.dumps(without_nan(row))}\n".encode()
    try:
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            written = file.write(line)
            if written < len(line):
                file.truncate(size)
                raise OSError(f"only {written} of {len(line)} bytes were written")
    except OSError as error:  # missing records must not end the training
        log.error(
            f"{path} could not be written ({error.strerror or error}): its records are incomplete; "
            "training continues"
        )


def without_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with None in place of numbers that are not finite, which JSON has not."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


def is_epoch(row: Mapping[str, Any]) -> bool:
    """Return whether a row holds the metrics after an epoch."""
    return row.get("kind", "epoch") == "epoch"


def read_rows(metrics: Path) -> list[dict[str, Any]]:
    """Return all rows; none if there is no file.

    A row that is just being written is left out, as one that a crash damaged.
    """
    text = metrics.read_text(errors="replace") if metrics.exists() else ""
    rows = map(parse_row, text.splitlines())
    return [row for row in rows if row is not None]


def parse_row(line: str | bytes) -> dict[str, Any] | None:
    """Return the row of a line; None if the line is damaged."""
    with suppress(ValueError):
        return json.loads(line)
    return None


def read_epochs(metrics: Path) -> list[dict[str, Any]]:
    """Return the rows of the epochs, as `read_rows`."""
    return list(filter(is_epoch, read_rows(metrics)))


def read_evaluations(metrics: Path) -> list[dict[str, Any]]:
    """Return the rows of the epochs and of evaluations within them, as `read_rows`."""
    return [row for row in read_rows(metrics) if row.get("kind") not in OF_STEPS]


def row_at(metrics: Path, epoch: int, step: int) -> dict[str, Any]:
    """Return the row of the evaluation after a step; without one, that of an epoch."""
    rows = [row for row in read_evaluations(metrics) if row.get("step") == step]
    return rows[-1] if rows else row_of(metrics, epoch)


def row_of(metrics: Path, epoch: int) -> dict[str, Any]:
    """Return the row of an epoch; an empty one if it was not recorded."""
    return next((row for row in read_epochs(metrics) if row["epoch"] == epoch), {})


def drop_rows(metrics: Path, epoch: int, step: int, evaluated_at: int | None = None) -> None:
    """Remove the rows after a run's position, which an interrupted launch wrote.

    Args:
        metrics: the file.
        epoch: first epoch that will be recorded.
        step: number of the last step that the run has taken.
        evaluated_at: the step of its last evaluation; None: `step`.
    """
    last_evaluation = step if evaluated_at is None else evaluated_at

    def is_before(row: dict[str, Any]) -> bool:
        if is_epoch(row):
            return row["epoch"] < epoch
        return row["step"] <= (step if row["kind"] in OF_STEPS else last_evaluation)

    if metrics.exists():
        rest = metrics.with_suffix(".tmp")
        rest.write_text(
            "".join(f"{json.dumps(row)}\n" for row in read_rows(metrics) if is_before(row))
        )
        rest.replace(metrics)


def objective(
    metrics: Path, choice: str, lower_is_better: bool = False
) -> tuple[str, float | None]:
    """Return the result of a run for a sweeper: a metric and its value, best val_* or last test_*.

    Args:
        metrics: the file.
        choice: the config's `optimize`.
        lower_is_better: whether low values of this metric are good ones, as those of the loss
            always are.

    Returns:
        The value is None if no finite one was recorded.
    """
    rows = read_epochs(metrics)
    if choice == "auto":
        last = rows[-1] if rows else {"test_accuracy": None}
        choice = next((name for name in ("val_loss", "test_accuracy") if name in last), "test_loss")
    if choice.startswith("val_"):
        rows = read_evaluations(metrics)
    values = [
        row[choice] for row in rows if row.get(choice) is not None and math.isfinite(row[choice])
    ]
    if not values or choice.startswith("test"):
        return choice, values[-1] if values else None
    return choice, min(values) if lower_is_better or choice == "val_loss" else max(values)


def kinds_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the metrics that any set has in some rows, such as loss and accuracy."""
    parts = (key.partition("_") for row in rows for key in row)
    return [
        kind
        for kind in dict.fromkeys(kind for name, _, kind in parts if name in SETS)
        if kind not in HIDDEN
    ]


def describe_metrics(row: Mapping[str, Any], sets: Sequence[str] = SETS) -> str:
    """Return the metrics in a row, as "train loss 0.1234 accuracy 0.9876 | val loss ..."."""
    parts: list[str] = []
    for name in sets:
        values = {kind: row.get(f"{name}_{kind}") for kind in kinds_of([row])}
        texts = [f"{kind} {value:.4f}" for kind, value in values.items() if value is not None]
        if texts:
            parts.append(f"{name} {' '.join(texts)}")
    return " | ".join(parts)


def describe_steps(row: Mapping[str, Any]) -> str:
    """Return the metrics of some steps, as "loss 0.1234, accuracy 0.9876, lr 0.05, ..."."""
    parts = [
        f"{name.replace('_', ' ')} {value:.4f}" for name, value in row.items() if name not in OTHERS
    ]
    parts += [
        f"lr {row['lr']:.4g}",
        f"{row['samples_per_second']:,.0f} samples/s",
        f"{row['data_wait']:.0%} waiting for data",
    ]
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.1%}")
    epoch, run = (tqdm.format_interval(row[name]) for name in ("eta_epoch", "eta"))
    return ", ".join(
        [*parts, f"{row['peak_memory_MiB']:,.0f} MiB, left: {epoch} of the epoch, {run} of the run"]
    )


def describe_result(
    metrics: Path, epoch: int, step: int, criterion: str | None, weights: Path, where: str
) -> str:
    """Return the last line of a run: its result, the median speed of its epochs, and its energy.

    Only epochs on the last number of devices count. The energy is that of the whole run.

    Args:
        metrics: the file.
        epoch, step: after which the weights are the result.
        criterion: metric of the validation set by which it was chosen; None: it is the last one.
        weights: the checkpoint.
        where: the devices.
    """
    rows = read_epochs(metrics)
    row = row_at(metrics, epoch, step)
    place = f"epoch {epoch}"
    if row.get("kind") == "evaluation":
        place += f", step {step}"
    which = f"best {criterion}" if criterion else "last"
    text = describe_metrics(row, SETS[1:]) or "no metrics"
    if rows:
        alike = [row for row in rows if row.get("world_size") == rows[-1].get("world_size")]
        seconds, rate = (
            statistics.median(row[key] for row in alike)
            for key in ("seconds", "samples_per_second")
        )
        text += f", {seconds:.2f} s/epoch, {rate:,.0f} samples/s on {where}"
        text += describe_energy(alike)
    return f"result: {place} ({which}), {text} ({weights})"


def describe_energy(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the energy after the last of some epochs, and the median of that of a sample.

    Return "" where it is unknown.
    """
    if "energy_kWh" not in rows[-1]:
        return ""
    text = f", {rows[-1]['energy_kWh']:.4g} kWh"
    by_epoch = [row["joules_per_sample"] for row in rows if "joules_per_sample" in row]
    if by_epoch:
        text += f", {statistics.median(by_epoch):.4g} J/sample"
    return text


def draw_metrics(metrics: Path, picture: Path) -> None:
    """Draw the metrics of metrics.jsonl by epoch. Draw nothing if there is no record."""
    records = read_epochs(metrics)
    plots = list[Plot]()
    for kind in kinds_of(records):
        lines: list[Curve] = []
        for name in SETS:
            key = f"{name}_{kind}"
            points = [(row["epoch"], row[key]) for row in records if row.get(key) is not None]
            if points:
                lines.append(Curve(name, points))
        if lines:
            plots += [
                curves(f"{metrics.parent.name}: {kind}", "epoch", kind, lines, zero=kind == "loss")
            ]
    if plots:
        beside(plots, picture)
