"""Fault: more worker processes than processors on a machine."""

from ddp_lab.config.errors import count
from ddp_lab.launchers.preflight import Finding

ABOUT = "processors"


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
