"""The report of a launch's first failure: on the screen, in failure.json and in status.json, by one rank only."""

import json
import time
from pathlib import Path
from typing import Any

from ddp_lab.config.errors import FailureKind
from ddp_lab.resilience.heartbeats import LISTED, Heartbeat
from ddp_lab.resilience.run_directory import write_status
from ddp_lab.world.process import show

FILE = "failure.json"
SHOWN = ("rank", "host", "epoch", "step", "doing")  # what is reported of the other ranks


def others(failed: int, everyone: list[Heartbeat]) -> list[Heartbeat]:
    """Return at most LISTED of the heartbeats other than that of the rank `failed`, by rank."""
    return sorted([beat for beat in everyone if beat["rank"] != failed][:LISTED], key=lambda beat: beat["rank"])


def describe(who: Heartbeat, what: str, everyone: list[Heartbeat]) -> str:
    """Return the message about a failure of the rank with the heartbeat `who`. `everyone`: as `Table.everyone`."""
    place = f"rank {who['rank']} on {who['host']} (pid {who['pid']}), epoch {who['epoch']}, step {who['step']}"
    message = f"error: {place}, {who['doing']}: {what.rstrip()}"
    if listed := others(who["rank"], everyone):
        message += "\nThe other ranks at that time: "
        message += "; ".join(f"rank {beat['rank']} {beat['doing']}, step {beat['step']}" for beat in listed)
    return message


def report(run_dir: Path, reporter: int, who: Heartbeat, kind: FailureKind, message: str, everyone: list[Heartbeat]) -> bool:
    """Write and print a failure if it is the launch's first. Return whether it is.

    Args:
        reporter: the rank that reports.
        who: the heartbeat of the rank that failed.
        everyone: as `Table.everyone`.
    """
    path = run_dir / FILE
    listed = [{key: beat[key] for key in SHOWN} for beat in others(who["rank"], everyone)]
    record: dict[str, Any] = {**who, "kind": kind, "message": message, "others": listed}
    try:
        with path.open("x") as file:  # fails if another rank was first
            json.dump(record | {"reported_by": reporter, "time": time.time()}, file, indent=1)
        write_status(run_dir, "failed", who["epoch"], who["step"])
    except FileExistsError:
        return False
    except OSError as error:  # a full disk or a removed directory: the failure is only printed
        message += f"\n(failure.json could not be written in {run_dir}: {error.strerror})"
    show(f"{message}\nDetails: {run_dir}/train*.log, {path}", int(who["since"]) - 1)
    return True
