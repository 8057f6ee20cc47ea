"""The CPUs that this process may use, by the scheduler and by the limit of a container."""

import os
from pathlib import Path


def allowed_cpus() -> list[int]:
    """Return the numbers of the CPUs on which this process may run.

    A scheduler such as Slurm gives each rank its own.
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))  # macOS


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPUs whose time the cgroups of this process may use; None: there is no limit.

    A cgroup is limited by those around it, too. In a container the outer ones are not visible, and
    its own one is the root.

    Args:
        root: of the file system.
    """
    quotas: list[float] = []
    for line in read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base = root / "sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            base = root / "sys/fs/cgroup/cpu"
        else:
            continue
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(base):
                quotas += quota_in(group)
    return min(quotas, default=None)


def quota_in(group: Path) -> list[float]:
    """Return the limit of a cgroup, in CPUs, by the files of version 2 or 1; [] if it has none."""
    values = " ".join(read_lines(group / "cpu.max")).split()
    if not values:
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        values = [line for name in files for line in read_lines(group / name)]
    if len(values) != 2 or values[0] in ("max", "-1"):
        return []
    quota, period = map(float, values)
    return [quota / period]


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file; [] if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
