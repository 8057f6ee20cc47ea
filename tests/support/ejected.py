"""Runs of train.py and of the files that `ddp-lab eject` writes of them, in the same ranks."""

import contextlib
import io
import os
import re
import runpy
from pathlib import Path
from typing import Any

from launches import main_in_world, read_metrics
from worlds import run_world

from ddp_lab.commands import eject

# what a run writes besides its losses
QUIET = ["tracker=none", "log_every=off", "device=cpu"]
MEANS = re.compile(r"(\w+) loss (\S+) accuracy (\S+)")
Losses = list[dict[str, float]]


def eject_to(file: Path, line: str, *options: str) -> str:
    """Write the plain file of overrides, and return its text."""
    with contextlib.redirect_stdout(io.StringIO()):
        eject.main([*line.split(), *options, "-o", str(file), "--force"])
    return file.read_text()


def losses_of_both(world_size: int, lines: list[str], folder: Path) -> list[tuple[Losses, Losses]]:
    """Train by train.py and by the plain file of each line of overrides.

    Returns:
        The losses and accuracies of each epoch by name, of each line: of train.py, and printed by
        the plain file.
    """
    for number, line in enumerate(lines):
        eject_to(folder / f"plain{number}.py", f"{line} device=cpu")
    return run_world(world_size, train_both, lines, str(folder))[0]


def train_both(lines: list[str], folder: str) -> list[tuple[Losses, Losses]]:
    """Train on this rank of a world; arguments and result as in `losses_of_both`."""
    os.chdir(folder)
    outcomes = []
    for number, line in enumerate(lines):
        name = f"run{number}"
        main_in_world(*line.split(), *QUIET, f"runs_dir={folder}", f"name={name}")
        # the store has the keys of every group that was opened before
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number + 1)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(f"plain{number}.py", run_name="__main__")
        del os.environ["TORCHELASTIC_RESTART_COUNT"]
        rows = [losses_in(row) for row in read_metrics(Path(folder, name))]
        outcomes.append((rows, printed_losses(printed.getvalue())))
    return outcomes


def losses_in(row: dict[str, Any]) -> dict[str, float]:
    """Return the losses and accuracies in a row of metrics.jsonl."""
    return {key: row[key] for key in row if re.fullmatch(r"(train|val|test)_(loss|accuracy)", key)}


def printed_losses(text: str) -> Losses:
    """Return the losses and accuracies of each line that a plain file has printed."""
    epochs = []
    for line in text.splitlines():
        values = {}
        for name, loss, accuracy in MEANS.findall(line):
            values[f"{name}_loss"] = float(loss)
            values[f"{name}_accuracy"] = float(accuracy)
        epochs.append(values)
    return epochs
