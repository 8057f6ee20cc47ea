"""Launches of two ranks, of which some raise a planted error of a user's class.

A judgement of what users then see.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from launches import finish, start

# The kinds of classes by which own_failing.py fails, and the places.
KINDS = ("strategy", "task", "tracker", "optimizer", "dataset", "model")
PLACES = ("constructor", "call")
LINE = [
    *(
        "data=own",
        "data.dataset._target_=own_failing.Dataset",
        "data.channels=1",
        "data.image_size=8",
    ),
    *(
        "data.mean=[0]",
        "data.std=[1]",
        "data.val_fraction=0.25",
        "model=own",
        "model._target_=own_failing.Model",
    ),
    *("strategy=ddp", "~strategy.batch_norm", "~strategy.bucket_cap_mb"),
    *("~strategy.find_unused_parameters", "strategy._target_=own_failing.Strategy"),
    *("task._target_=own_failing.Task", "tracker=own_failing.Tracker"),
    *("optimizer._target_=own_failing.Optimizer", "epochs=1", "batch_size=4"),
]
COMMANDS = {
    "ddp-lab": "python -m ddp_lab train --nproc 2",
    "torchrun": "torchrun --nproc_per_node=2 train.py",
}
# What only follows from the end of another rank, as torch, gloo and NCCL say it.
INNOCENT = re.compile(
    r"DistNetworkError|DistStoreError|Connection (closed|reset)|Failed to recv|gloo/|Broken pipe"
)


class Outcome(NamedTuple):
    """What a launch has shown.

    Attributes:
        problem: what is wrong with it; "" if it is right.
        code: the exit code.
        output: everything that was printed.
    """

    problem: str
    code: int
    output: str


def launch_planted(
    kind: str, place: str, options: str, command: str, runs_dir: Path, more: Sequence[str] = ()
) -> Outcome:
    """Start two ranks with a planted error, and judge what is shown.

    Args:
        kind, place: of KINDS, or one that `more` chooses, and of PLACES.
        options: of the error, as in own_failing.py.
        command: of COMMANDS.
        runs_dir: of the run.
        more: further overrides.
    """
    planted = f"PLANTED={kind} {place} {options}"
    program = COMMANDS[command].split()
    code, output = finish(
        start("env", planted, *program, *LINE, *more, f"runs_dir={runs_dir}"), 200
    )
    return Outcome(judge(kind, place, command, code, output), code, output)


def judge(kind: str, place: str, command: str, code: int, output: str) -> str:
    """Return what is wrong with exit code and output of a launch with a planted error, or ""."""
    if innocent := INNOCENT.search(output):
        return f"shows an error that another rank's end has caused: {innocent[0]}"
    text = f"planted in {kind} {place}"
    shown = len(re.findall(rf"(SlowError|TypeError): {text}", output))
    if shown != 1:
        return f"shows the error {shown} times"
    if kind == "tracker":  # training continues without it
        return "" if code == 0 else f"ends with exit code {code}"
    if "own_failing.py" not in output:
        return "does not name the file of the user's class"
    if place == "call":
        return "" if code in (1, 2) else f"ends with exit code {code}"
    if "Traceback" in output.partition("Root Cause")[2 if command == "torchrun" else 0]:
        return "shows a traceback for a constructor"
    expected = 1 if command == "torchrun" else 2
    return "" if code == expected else f"ends with exit code {code}, expected {expected}"
