"""The outcome of a launch as one JSON object: `ddp-lab train --json FILE`.

The process that the user has started writes it at its end, from the files of the run directory and
from what ranks have noted in FILE (`note` in world/process.py): their run directory, its result,
and an error. So it is written, too, when ranks were killed, or when the watchdog ends the process.
"""

import json
import os
from pathlib import Path
from typing import Any

from ddp_lab.config.types import SETS
from ddp_lab.resilience.run_directory import read_json, write_json
from ddp_lab.world.process import OUTCOME, replace_text

# By exit code, whatever the run directory says. 75 is EX_TEMPFAIL, and 130 is 128 + SIGINT.
STATUSES = {2: "refused", 75: "preempted", 130: "interrupted"}


def begin(file: Path) -> None:
    """Let this process, and the ranks that it starts, note the outcome of the launch in a file."""
    path = file.absolute()
    os.environ[OUTCOME] = str(path)
    write_json(path, {"status": "running"})


def end() -> None:
    """Note nothing any more."""
    os.environ.pop(OUTCOME, None)


def write(code: int) -> None:
    """Write the outcome of the launch to the file of `begin`.

    Args:
        code: exit code of the command.
    """
    file = Path(os.environ[OUTCOME])
    noted = read_json(file) or {}
    if "of_host" in noted:  # over ssh, where the run directory may be on another machine
        record = noted["of_host"]
        if code:
            record |= {"status": status_of(code, None), "error": noted.get("error")}
        replace_text(file, in_lines(record | {"exit_code": code}))
        return
    folder = Path(noted["run_dir"]) if "run_dir" in noted else None
    record: dict[str, Any] = {
        "status": status_of(code, folder),
        "exit_code": code,
        "error": noted.get("error"),
    }
    record |= dict.fromkeys(
        ("run_dir", "metrics_file", "checkpoints", "best_checkpoint", "epoch", "step", "metrics")
    )
    if folder is not None:
        record |= in_folder(folder)
        failure = read_json(folder / "failure.json")
        if code and failure:
            # without the prefix, as that of a run that is refused
            record["error"] = failure["message"].removeprefix("error: ")
    record["result"] = noted.get("result")
    replace_text(file, in_lines(record))


def in_lines(record: dict[str, Any]) -> str:
    """Return a record as JSON, for people, too."""
    return f"{json.dumps(record, indent=1)}\n"


def status_of(code: int, folder: Path | None) -> str:
    """Return how a launch has ended: finished, preempted, interrupted, refused or failed."""
    if code in STATUSES:
        return STATUSES[code]
    recorded = read_json(folder / "status.json") if folder else None
    # with several ranks the exit code is 0 if one of them alone was preempted
    return (recorded or {}).get("status", "finished") if code == 0 else "failed"


def in_folder(folder: Path) -> dict[str, Any]:
    """Return what a run directory says: its files, the position and the last evaluation."""
    from ddp_lab.checkpoints.files import best_in, steps_in
    from ddp_lab.observe.metrics_file import read_evaluations

    metrics = folder / "metrics.jsonl"
    status = read_json(folder / "status.json") or {}
    rows = read_evaluations(metrics)
    best = best_in(folder / "checkpoints")
    return {
        "run_dir": str(folder),
        "metrics_file": str(metrics) if metrics.exists() else None,
        "checkpoints": [str(path) for path in steps_in(folder / "checkpoints")],
        "best_checkpoint": None if best is None else str(best),
        "epoch": status.get("epoch"),
        "step": status.get("step"),
        "metrics": last_metrics(rows[-1]) if rows else None,
    }


def last_metrics(row: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics in a row of metrics.jsonl, and where they were computed."""
    places = {key: row[key] for key in ("epoch", "step") if key in row}
    return places | {key: value for key, value in row.items() if key.partition("_")[0] in SETS}
