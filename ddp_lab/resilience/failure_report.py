"""The report of a launch's first failure: on the screen, in failure.json and in status.json, by one rank only."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_lab.config.errors import FailureKind
from ddp_lab.resilience.node_board import Heartbeat
from ddp_lab.resilience.overview import LISTED, Overview, suspicion
from ddp_lab.resilience.run_directory import write_status
from ddp_lab.world.process import show

FILE = "failure.json"
SHOWN = ("rank", "host", "epoch", "step", "doing")  # what is reported of the other ranks
# What to do about errors of torch that the user's choices cause, by a part of their texts.
ADVICE = {
    "Expected more than 1 value per channel when training": "BatchNorm cannot compute the variance of one sample. Choose a "
    "batch_size with which each rank, and each micro-batch, has two samples or more, in the last batch of an epoch, too",
    "Expected to have finished reduction in the prior iteration": "The parameters named above got no gradient in the step "
    "before. If only some steps use a parameter, use strategy=fsdp or strategy=single, which support it: ddp_lab has no key "
    "find_unused_parameters",
    "out of memory": "Lower batch_size, raise accumulate, or choose another strategy: ddp-lab advise, with the same "
    "overrides, predicts which ones fit",
}


@dataclass
class Others:
    """The ranks that have not failed first.

    Attributes:
        listed: heartbeats of at most LISTED ranks, by rank: of the reporting rank's node, and those with the least progress.
        summary: what all ranks of the launch do; None if all but the failed one are listed.
    """

    listed: list[Heartbeat]
    summary: str | None

    @classmethod
    def of(cls, failed: int, world_size: int, near: list[Heartbeat], everyone: Overview | None) -> "Others":
        """Return the ranks other than `failed`.

        Args:
            near: the heartbeats of the reporting rank's node.
            everyone: the overview of all ranks; None if they are all on this node.
        """
        everyone = everyone or Overview.of(near)
        known = {beat["rank"]: beat for beat in [*near, *everyone.least]}
        known |= {beat["rank"]: beat for beat in near}  # which are newer
        known.pop(failed, None)
        listed = sorted(known.values(), key=lambda beat: (beat not in near, suspicion(beat)))[:LISTED]
        return cls(sorted(listed, key=lambda beat: beat["rank"]), str(everyone) if len(listed) < world_size - 1 else None)

    def __str__(self) -> str:
        text = "; ".join(f"rank {beat['rank']} {beat['doing']}, step {beat['step']}" for beat in self.listed)
        return text + (f". All ranks: {self.summary}" if self.summary else "")


def advice(error: str) -> str:
    """Return a line that says what to do about an error of torch; "" for an error that is not known.

    Args:
        error: the text of the error and of its causes.
    """
    return next((f"\n{todo}" for part, todo in ADVICE.items() if part in error), "")


def describe(who: Heartbeat, what: str, others: Others) -> str:
    """Return the message about a failure of the rank with the heartbeat `who`."""
    place = f"rank {who['rank']} on {who['host']} (pid {who['pid']}), epoch {who['epoch']}, step {who['step']}"
    message = f"error: {place}, {who['doing']}: {what.rstrip()}"
    return f"{message}\nThe other ranks at that time: {others}" if others.listed else message


def report(run_dir: Path, reporter: int, who: Heartbeat, kind: FailureKind, message: str, others: Others) -> bool:
    """Write and print a failure if it is the launch's first. Return whether it is.

    Args:
        reporter: the rank that reports.
        who: the heartbeat of the rank that failed.
    """
    path = run_dir / FILE
    listed = [{key: beat[key] for key in SHOWN} for beat in others.listed]
    record: dict[str, Any] = {**who, "kind": kind, "message": message, "others": listed, "all": others.summary}
    record |= {"reported_by": reporter, "time": time.time()}
    temporary = path.with_name(f".failure.{reporter}.{os.getpid()}")
    try:
        if path.exists():
            return False
        temporary.write_text(json.dumps(record, indent=1))
        place(temporary, path)
        write_status(run_dir, "failed", who["epoch"], who["step"])
    except FileExistsError:
        return False
    except OSError as error:  # a full disk or a removed directory: the failure is only printed
        message += f"\n(failure.json could not be written in {run_dir}: {error.strerror})"
    finally:
        temporary.unlink(missing_ok=True)
    show(f"{message}\nDetails: {run_dir}/train*.log, {path}", int(who["since"]) - 1)
    return True


def place(temporary: Path, path: Path) -> None:
    """Give a file its name, which must be new: only the first failure is reported.

    Raises:
        FileExistsError: the name exists.
    """
    try:
        os.link(temporary, path)  # complete at once, and unlike a rename it fails if the file exists
    except FileExistsError:
        raise
    except OSError:  # some volumes of pods have no hard links
        with path.open("x") as file:
            file.write(temporary.read_text())
