"""What the child processes of two ranks do together: exchange data, and measure how fast."""

import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Documented as torch.distributed.Store etc., but the module does not export them explicitly.
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ddp_lab.launchers.fabric.child import LIMIT

FIRST_BYTES = 2**20  # of the exchanges whose time decides how large the others are
LARGEST_BYTES = {"cuda": 2**28, "cpu": 2**24}
SECONDS = 0.5  # that the measured exchanges are to take
REPEATS = 5  # measured exchanges
GB = 1e9
# A matrix whose product keeps every multiprocessor of a GPU busy for some milliseconds.
BUSY_SIZE = 4096


class Meeting(NamedTuple):
    """Where and as what a rank meets another one.

    Attributes:
        host, port: of the ranks' store.
        prefix: of the keys of this meeting in the store, which no other meeting has.
        pair: the two ranks.
        role: 0 for the first rank of the pair, 1 for the second.
    """

    host: str
    port: int
    prefix: str
    pair: tuple[int, int]
    role: int


def open_device(kept: dict[str, Any], device: str) -> None:
    """Prepare a child process: choose its device.

    Args:
        kept: what the process keeps.
        device: "cpu" or "cuda:N".
    """
    torch.set_num_threads(1)
    kept["device"] = torch.device(device)
    if kept["device"].type == "cuda":
        torch.cuda.set_device(kept["device"])
        torch.zeros(1, device=kept["device"])


def keep_busy(kept: dict[str, Any], seconds: float) -> None:
    """Multiply matrices on the GPU for some seconds, so that its clocks rise."""
    matrix = torch.randn(BUSY_SIZE, BUSY_SIZE, device=kept["device"], dtype=torch.bfloat16)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for _ in range(20):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize(kept["device"])


def measure_pair(kept: dict[str, Any], meeting: Meeting) -> float:
    """Exchange data with another rank; return the GB/s of each direction, both at the same time.

    Raises:
        RuntimeError: the ranks cannot connect, or other data arrive than were sent.
    """
    device = kept["device"]
    store = TCPStore(
        meeting.host,
        meeting.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=LIMIT),
    )
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(meeting.prefix, store),
        rank=meeting.role,
        world_size=2,
        timeout=timedelta(seconds=LIMIT),
        device_id=device if device.type == "cuda" else None,
    )
    rate = bandwidth(device, meeting.role)
    dist.destroy_process_group()
    return rate


def bandwidth(device: torch.device, role: int) -> float:
    """Return the GB/s in each direction between the two ranks of the process group. Collective."""
    exchange(device, role, FIRST_BYTES, 1)  # connects the ranks
    seconds = exchange(device, role, FIRST_BYTES, 1)
    affordable = int(FIRST_BYTES * SECONDS / REPEATS / seconds)
    size = min(max(affordable, FIRST_BYTES), LARGEST_BYTES[device.type])
    exchange(device, role, size, 1)
    return size * REPEATS / exchange(device, role, size, REPEATS) / GB


def exchange(device: torch.device, role: int, size: int, repeats: int) -> float:
    """Send and receive bytes several times; return the seconds of the slower rank. Collective.

    Raises:
        RuntimeError: other bytes arrived than were sent.
    """
    peer = 1 - role
    outgoing = torch.full((size,), role + 1, dtype=torch.uint8, device=device)
    incoming = torch.zeros_like(outgoing)
    dist.all_reduce(torch.zeros(1, device=device))
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, outgoing, peer), dist.P2POp(dist.irecv, incoming, peer)]
        )
        for work in works:
            work.wait()
    synchronize(device)
    seconds = torch.tensor(time.perf_counter() - start, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if not bool((incoming == peer + 1).all()):
        raise RuntimeError("other data arrived than were sent")
    return float(seconds)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
