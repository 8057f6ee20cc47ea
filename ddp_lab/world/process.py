"""This process, its place in a launch of torchrun, and the other processes of this machine.

This module does not import torch, so that a command can report an error before torch is loaded.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil

# Requests to save a checkpoint and exit. A scheduler or a terminal sends them to all processes of a
# launch.
REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Of glibc's malloc.h.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
LARGEST = 32 * 2**20  # bytes; the most that every version of glibc accepts as MMAP_THRESHOLD
NEVER = 2**31 - 1
# the file in which the outcome of the launch is noted, for `ddp-lab train --json`
OUTCOME = "DDP_LAB_OUTCOME"


@dataclass(frozen=True)
class RankInfo:
    """Which rank of which node a process is.

    A node is what one torchrun agent starts, usually one machine.

    Attributes:
        rank, world_size: Index of this process and number of processes.
        local_rank, local_world_size: The same, counting only the processes of this node.
        node, nodes: Index of this node and number of nodes.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "RankInfo":
        """Return the place that torchrun's environment variables describe.

        Without them it is that of a single process.
        """
        rank = int(environment.get("RANK", 0))
        world_size = int(environment.get("WORLD_SIZE", 1))
        local_size = int(environment.get("LOCAL_WORLD_SIZE", 1))
        node = int(environment.get("GROUP_RANK", rank // local_size))
        nodes = int(environment.get("GROUP_WORLD_SIZE", -(-world_size // local_size)))
        local_rank = int(environment.get("LOCAL_RANK", 0))
        # `torchrun --virtual-local-rank` gives all ranks LOCAL_RANK=0
        if local_rank == 0 and "TORCHELASTIC_RUN_ID" in environment:
            local_rank = rank - first_rank(rank, world_size, local_size, node, nodes)
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_size,
            node=node,
            nodes=nodes,
        )

    @property
    def has_known_place(self) -> bool:
        """Whether the local rank is certain, although LOCAL_RANK may be 0 on all ranks of a node.

        On a node between the first and the last one it is not, if the nodes have different numbers
        of ranks.
        """
        is_at_end = self.node in (0, self.nodes - 1)
        are_equal = self.world_size == self.nodes * self.local_world_size
        return is_at_end or are_equal or self.local_rank > 0


def first_rank(rank: int, world_size: int, local_size: int, node: int, nodes: int) -> int:
    """Return the first rank of the node of a rank whose LOCAL_RANK is 0, as in `RankInfo`.

    torchrun numbers the ranks node by node.
    """
    if world_size == nodes * local_size:
        return node * local_size
    if node == 0:
        return 0
    return world_size - local_size if node == nodes - 1 else rank


def env_int(name: str, default: int) -> int:
    """Return the environment variable `name` as an integer, or `default` if it is not set."""
    return int(os.environ.get(name, default))


def run_id() -> str | None:
    """Return torchrun's --rdzv-id; None without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def launch_id() -> str:
    """Return an identifier of this launch; an elastic restart does not change it.

    It consists of the host, process id and start time of torchrun's agent, which outlives its
    ranks. torchrun's run id does not identify a launch: without --standalone it is "none", and
    users reuse theirs. Neither does the number of restarts, which each node counts separately. A
    requeued Slurm job sets its own identifier (scripts/slurm/train.sbatch).
    """
    if "DDP_LAB_LAUNCH" in os.environ:
        return os.environ["DDP_LAB_LAUNCH"]
    pid = os.getppid() if run_id() is not None else os.getpid()
    return f"{socket.gethostname()}-{pid}-{start_time(pid)}"


def start_time(pid: int) -> str:
    """Return the start time of a process; "" if it cannot be read.

    It distinguishes processes with the same id.
    """
    try:
        # in clock ticks since boot. psutil adds the boot time, which changes when the clock is set.
        if sys.platform == "linux":
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return str(psutil.Process(pid).create_time())
    except (psutil.Error, OSError):
        return ""


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine is running. A zombie counts as not running.

    A process whose state cannot be read counts as running: a missed dead rank is still detected by
    the timeout, whereas a healthy launch that is ended by mistake is lost.
    """
    try:
        os.kill(pid, 0)  # signal 0 only checks that the process exists
    except ProcessLookupError:
        return False
    except OSError:
        pass  # the process exists and belongs to another user
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except (psutil.Error, OSError):  # /proc may be missing or not show the process
        return True


def die_with_torchrun() -> None:
    """Arrange for this rank to be killed when its agent dies, on Linux.

    Otherwise it would survive a SIGKILL of the agent.
    """
    if run_id() is not None:
        die_with_parent()


def die_with_parent() -> None:
    """Arrange for this process to be killed when its parent dies, on Linux."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def print_line(text: str, stream: TextIO) -> None:
    """Print a line by one write, so that those of other processes do not come between its parts.

    Where Python does not buffer (PYTHONUNBUFFERED), `print` writes the end of the line by itself.

    Args:
        text: without the end of the line.
        stream: stdout or stderr.
    """
    stream.write(f"{text}\n")
    stream.flush()


def show(message: str, code: int = 1, began: float | None = None, secondary: bool = False) -> None:
    """Print an error to stderr, or under torchrun write it to the file that the launcher prints.

    Args:
        message: The text to report.
        code: The exit code of this rank.
        began: Unix time at which the problem began; None: now. Of several ranks' errors the
            earliest is shown.
        secondary: Whether the error most likely follows from the end of another rank. It is then
            shown only if there is no other.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        print_line(message, sys.stderr)
        return
    time_of_error = time.time() if began is None else began
    # torch's launcher reads the first two, and whole seconds only; `ddp-lab train` all of them.
    extra: dict[str, Any] = {
        "py_callstack": message,
        "timestamp": str(int(time_of_error)),
        "time": time_of_error,
        "secondary": secondary,
    }
    record = {"message": {"message": message, "errorCode": code, "extraInfo": extra}}
    Path(error_file).write_text(json.dumps(record))


def note(**facts: Any) -> None:
    """Note facts about this launch in the file of `ddp-lab train --json`, if it has that option."""
    name = os.environ.get(OUTCOME)
    if name is None:
        return
    path = Path(name)
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        record = {}
    replace_text(path, json.dumps(record | facts))


def replace_text(path: Path, text: str) -> None:
    """Write a text file anew, so that a reader finds the old or the new content."""
    # threads of one process may write the same file
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def discard_output() -> None:
    """Continue without stdout, whose reader has gone, and report it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print_line("stopped: the reader of the output has gone, for example `| head`", sys.stderr)


@contextmanager
def default_timeout(seconds: float) -> Generator[None]:
    """Set the default timeout, in seconds, of sockets that are created in the body."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for its next tensors.

    Return whether its C library supports that: glibc does.

    By default glibc gives it back to the system, which has to clear and map every page again in the
    next step: 3,100 pages in a step of LeNet with 64 images, which then took 32.5 ms of CPU time in
    place of 24.3 (2 CPU cores, not quiet, torch 2.15, 2026-11-26). The cost: what the process once
    had, it holds until its end.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    is_set = mallopt(TRIM_THRESHOLD, NEVER)
    in_heap = mallopt(MMAP_THRESHOLD, LARGEST)
    return bool(is_set and in_heap)
