"""Fault: more worker processes than processors on a machine."""

import math
import os
from pathlib import Path

import psutil

from ddp_lab.config.errors import count
from ddp_lab.launchers.preflight import Finding

ABOUT = "processors"
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time, of a period


def usable_processors() -> list[int]:
    """Return the numbers of the processors that this process may use.

    A scheduler such as Slurm gives each rank its own.
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))


def quota() -> float:
    """Return how many processors the container may keep busy; infinite without a limit."""
    try:
        limit, period = QUOTA.read_text().split()
        return int(limit) / int(period)
    except (OSError, ValueError):  # no such file; "max"
        return math.inf


def check_processors(workers: int, ranks: int, processors: int) -> Finding:
    """Return a finding about the worker processes of a machine.

    Args:
        workers: worker processes of each rank.
        ranks: number of ranks of the machine.
        processors: number that they may use together.
    """
    needed = workers * ranks
    text = f"{count(workers, 'worker')} x {count(ranks, 'rank')} on {count(processors, 'CPU')}"
    if needed <= processors:
        return Finding("ok", ABOUT, text)
    fitting = processors // ranks
    return Finding(
        "warning",
        ABOUT,
        f"{text}: the worker processes wait for each other. Use data.num_workers={fitting}, or "
        "ask the scheduler for more CPUs: --cpus-per-task of Slurm, limits.cpu of Kubernetes",
    )
