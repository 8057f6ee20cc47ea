"""Runs of train.py and of the plain files of `ddp-lab eject`, each in ranks of its own."""

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
    outcomes = []
    for number, line in enumerate(lines):
        file = folder / f"plain{number}.py"
        eject_to(file, f"{line} device=cpu")
        options = [*line.split(), *QUIET, f"runs_dir={folder}", f"name=run{number}"]
        run_world(world_size, main_in_world, *options, timeout=120)
        printed = run_world(world_size, run_plain, str(file), timeout=120)[0]
        rows = [losses_in(row) for row in read_metrics(folder / f"run{number}")]
        outcomes.append((rows, printed_losses(printed)))
    return outcomes


def run_plain(file: str) -> str:
    """Run a plain file on this rank, in its folder, and return what it prints."""
    os.chdir(Path(file).parent)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(file, run_name="__main__")
    return printed.getvalue()


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
