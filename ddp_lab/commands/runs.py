"""List the runs in a directory, show one of them, compare two, or delete the empty ones.

An empty run has neither a finished epoch nor a checkpoint.

ddp-lab runs                                  a table, the run that changed last at the end
ddp-lab runs mine                             the curves of one run: its name, or its directory
ddp-lab runs diff mine other                  why two runs differ
ddp-lab runs --runs-dir /shared/runs --clean  names what can be deleted, and asks

The runs of sweeps in the directory are listed, too. `best` is the metric of the validation set that
chose the best checkpoint, else the last one of the test set; `rate` is in samples per second.
diff compares what the runs have recorded: config, data, order of the samples, code, versions,
devices and losses. It names the first step whose loss differs, and the likely cause. Its exit code
is 0 if all losses that both have recorded are equal, and else 1.
--clean deletes no run that a launch may be writing in: none that is running, and none whose last
launch was on another machine less than a day ago. It follows no symbolic link.
"""

import argparse
import math
import shutil
import sys
import time
from pathlib import Path

import numpy as np

from ddp_lab.config.errors import ConfigError
from ddp_lab.config.types import SETS
from ddp_lab.launchers.arguments import Parser, confirm
from ddp_lab.launchers.run_names import existing_run
from ddp_lab.observe.metrics_file import kinds_of
from ddp_lab.resilience.run_directory import read_json
from ddp_lab.run.diff import compare_runs, describe
from ddp_lab.run.runs import Run, find_runs

HEAD = ("name", "state", "epoch", "best", "rate", "age")
MARKS: dict[str, str] = dict(zip(SETS, ".ox", strict=True))
UNITS = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")]  # of an age, in seconds
HEIGHT = 12  # lines of a curve
LABEL = 10  # characters of a number beside it


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("ddp-lab runs", __doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="[show | diff] NAME",
        help="the curves of a run: its name, as in the table, or its directory; with diff and two "
        "of them, why the runs differ",
    )
    parser.add_argument(
        "--runs-dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="runs_dir of the runs (default: runs)",
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="delete runs without a finished epoch and without a checkpoint",
    )
    parser.add_argument("--yes", action="store_true", help="delete without asking")

    namespace = parser.parse_args(arguments)
    action, names = action_of(namespace.names)
    expected = {"": 0, "show": 1, "diff": 2}[action]
    if (
        len(names) != expected
        or (namespace.clean and action)
        or (namespace.yes and not namespace.clean)
    ):
        raise ConfigError(
            "ddp-lab runs: needs nothing, [show] NAME, diff NAME NAME, or --clean with or without "
            "--yes; see ddp-lab runs --help"
        )
    namespace.action = action
    namespace.names = names
    return namespace


def main(arguments: list[str]) -> None:
    namespace = parse(arguments)
    root = namespace.runs_dir
    if namespace.action == "diff":
        sys.exit(show_difference(root, *namespace.names))
    if namespace.action == "show":
        (name,) = namespace.names
        path = existing_run(name, root)
        listed_in = root if path.is_relative_to(root) else path.parent
        return print(show(Run(listed_in, path)))

    runs = find_runs(root)
    if namespace.clean:
        clean(root, [run for run in runs if run.is_removable()], namespace.yes)
    elif runs:
        print(table(runs))
    else:
        print(f"no runs in {root}; --runs-dir DIR is the runs_dir of your runs")


def action_of(names: list[str]) -> tuple[str, list[str]]:
    """Return what the positional arguments ask for, "", "show" or "diff", and the runs."""
    if names[:1] in (["show"], ["diff"]):
        return names[0], names[1:]
    return ("show", names) if names else ("", [])


def show_difference(root: Path, one: str, other: str) -> int:
    """Print why two runs differ; return the exit code, 0 if all losses that both have are equal.

    Args:
        root: the config's `runs_dir`.
        one, other: names of runs in it, or paths of run directories.
    """
    folders = [existing_run(name, root) for name in (one, other)]
    comparison = compare_runs(*folders)
    print(f"{folders[0]} -> {folders[1]}")
    print(describe(comparison))
    return int(comparison.loss is not None or comparison.compared == 0)


def clean(root: Path, runs: list[Run], yes: bool) -> None:
    """Delete runs after the user has agreed."""
    if not runs:
        return print(
            f"nothing to delete in {root}: each run has a finished epoch or a checkpoint, or may "
            "be running"
        )
    print(table(runs))
    confirm(f"Delete {', '.join(str(run.path) for run in runs)}?", yes)
    for run in runs:
        print(f"{run.path}: {'deleted' if run.remove() else 'kept: a launch has begun in it'}")


def cells(run: Run) -> tuple[str, ...]:
    """Return the row of a run, in the columns HEAD."""
    (metric, value) = run.best()
    last = run.rows[-1] if run.rows else {}
    best = "-" if value is None else f"{metric} {value:.4f}"
    rate = f"{last['samples_per_second']:,.0f}" if last else "-"
    age = max(1.0, time.time() - run.changed)
    size, unit = next(each for each in UNITS if age >= each[0])
    return (
        run.name,
        run.state,
        f"{last.get('epoch', 0)}/{run.epochs or '?'}",
        best,
        rate,
        f"{age // size:.0f} {unit}",
    )


def table(runs: list[Run]) -> str:
    """Return a table of runs as text, with columns of equal width."""
    rows = [HEAD, *map(cells, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def show(run: Run) -> str:
    """Return the row of a run, the error with which it failed, and a curve of each metric."""
    parts = [table([run])]
    failure = read_json(run.path / "failure.json")
    if failure:
        parts.append(failure["message"])
    for kind in kinds_of(run.rows):
        curves = {
            name: [(row["epoch"], row.get(f"{name}_{kind}")) for row in run.rows] for name in SETS
        }
        finite = {
            name: [(x, y) for x, y in line if y is not None and math.isfinite(y)]
            for name, line in curves.items()
        }
        lines = {name: line for name, line in finite.items() if line}
        if lines:
            parts.append(curve(kind, lines))
    return "\n\n".join(parts if run.rows else [*parts, "no epoch is finished"])


def curve(title: str, lines: dict[str, list[tuple[int, float]]]) -> str:
    """Return lines over epochs as text, as wide as the terminal.

    `lines` has at least one point for each set.
    """
    epochs, values = zip(*(point for line in lines.values() for point in line), strict=True)
    (first, last), (low, high) = ((min(each), max(each)) for each in (epochs, values))
    width = min(max(shutil.get_terminal_size().columns, 40), 100) - LABEL - 3
    grid = [[" "] * width for _ in range(HEIGHT)]
    for name, line in lines.items():
        xs, ys = zip(*line, strict=True)
        heights = np.interp(np.linspace(first, last, width), xs, ys)
        for column, row in enumerate(
            np.rint((high - heights) / ((high - low) or 1) * (HEIGHT - 1)).astype(int)
        ):
            grid[row][column] = MARKS[name]

    labels = {0: f"{high:.4g}", HEIGHT - 1: f"{low:.4g}"}
    drawn = [
        f"{labels.get(number, ''):>{LABEL}} |{''.join(row).rstrip()}"
        for number, row in enumerate(grid)
    ]
    axis = f"{'epoch':>{LABEL}}  {first}{last:>{width - len(str(first))}}"
    return "\n".join(
        [f"{title}: {', '.join(f'{MARKS[name]} {name}' for name in lines)}", *drawn, axis]
    )
