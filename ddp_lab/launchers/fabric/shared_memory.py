"""Fault: a container without enough shared memory."""

import shutil

from ddp_lab.launchers import preflight
from ddp_lab.launchers.preflight import Finding
from ddp_lab.world.device import size

ABOUT = "shared memory"
# For each rank: NCCL's buffers to the other ranks of the machine, of some MiB each, and the batches
# of worker processes. A container of Docker has 64 MiB for all of them.
NEEDED_BYTES = 2**26


def check_shared_memory(ranks: int) -> Finding:
    """Return a finding about the free shared memory of this machine.

    Args:
        ranks: number of ranks of this machine.
    """
    folder = preflight.SHARED_MEMORY
    if not folder.exists():
        return Finding("ok", ABOUT, f"this system has no {folder}")
    free = shutil.disk_usage(folder).free
    needed = ranks * NEEDED_BYTES if ranks > 1 else 0
    if free < needed:
        return Finding(
            "warning",
            ABOUT,
            f"{folder} has {size(free)} free, and {ranks} ranks may need {size(needed)}: NCCL "
            "cannot start, or worker processes die of SIGBUS. Enlarge it: in a container `docker "
            "run --shm-size=1g` or --ipc=host, under Kubernetes a volume emptyDir with medium: "
            "Memory",
        )
    return Finding("ok", ABOUT, f"{folder} has {size(free)} free")
