"""Whether the batches that DataLoader workers prepare fit in the shared memory of the machine."""

import math
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

from ddp_lab.config.errors import NodeError
from ddp_lab.data.loader import Loader
from ddp_lab.launch.preflight.finding import Finding

SHARED_MEMORY = Path("/dev/shm")  # where torch's worker processes put tensors on Linux


def check_shared_memory(loaders: Iterable[Loader], ranks: int) -> Finding:
    """Check that the batches in shared memory fit on the node that calls it; without the check, a worker dies of SIGBUS.

    Args:
        loaders: All loaders of a rank, which keep their batches ready at the same time.
        ranks: Number of ranks of this node.

    Raises:
        NodeError: They do not fit.
    """
    needed = ranks * sum(loader.shared_bytes for loader in loaders)
    if not needed:
        return Finding("ok", "loader", "no worker processes prepare batches, so no shared memory is needed")
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else math.inf
    text = (
        f"the batches of DataLoader workers on {socket.gethostname()} need {needed / 2**20:,.1f} MiB of shared memory, and "
        f"{SHARED_MEMORY} has {free / 2**20:,.1f} MiB free"
    )
    if needed <= free:
        return Finding("ok", "loader", text)
    size = math.ceil(2 * needed / 2**30)
    raise NodeError(
        f"data.loader=workers: {text}. Lower data.num_workers (0 needs none) or batch_size, or enlarge {SHARED_MEMORY}: in a "
        f"container `docker run --shm-size={size}g`, under Kubernetes a volume emptyDir with medium: Memory"
    )
