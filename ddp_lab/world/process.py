"""Processes: this one as torchrun started it, and the others of this machine. Imports no torch, so that a command can answer
before torch is loaded.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path


def env_int(name: str, default: int) -> int:
    """Return the environment variable `name` as an integer, `default` where it is not set."""
    return int(os.environ.get(name, default))


def run_id() -> str | None:
    """Return what torchrun was given as --rdzv-id."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def launch_id() -> str:
    """Name this launch, the same before and after an elastic restart.

    It is torchrun's agent, which outlives its ranks: host, process and start. The run id is no name (without --standalone it is
    "none", and users repeat theirs), nor is the number of restarts, which each node counts for itself. A job of Slurm that is
    requeued names itself (scripts/slurm/train.sbatch).
    """
    if "DDP_LAB_LAUNCH" in os.environ:
        return os.environ["DDP_LAB_LAUNCH"]
    pid = os.getppid() if run_id() is not None else os.getpid()
    return f"{socket.gethostname()}-{pid}-{start_time(pid)}"


def start_time(pid: int) -> str:
    """Return when a process started, to tell it from an earlier one with the same number; empty where that cannot be read."""
    try:
        if sys.platform == "linux":
            # In clock ticks since boot. psutil adds the time of the boot, which changes when the clock is set.
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        import psutil

        return str(psutil.Process(pid).create_time())
    except Exception:  # psutil's own errors, or OSError
        return ""


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine runs; a zombie does not.

    A process whose state cannot be read counts as running: a dead rank is also noticed by the timeout, but a healthy launch
    that is ended is lost.
    """
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it exists and belongs to another user
    try:
        import psutil  # 40 ms, which only a launch of several ranks needs

        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except Exception:  # without /proc psutil finds no process on Linux, and may fail in other ways
        return True


def machine() -> str:
    """Name the scope in which a process number means the same process: this boot of this machine, in this container.

    Where the kernel does not name it (macOS, or /proc is hidden), the ranks of one torchrun agent are that scope: they have the
    same parent.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"{socket.gethostname()}-{os.getppid()}"


def die_with_torchrun() -> None:
    """End this rank when its agent is killed by SIGKILL, which would leave the ranks running on their GPUs."""
    if run_id() is None:
        return
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_die_with, args=(os.getppid(),), name="parent", daemon=True).start()


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def show(message: str, timestamp: int | None = None) -> None:
    """Prints on stderr; under torchrun leaves it for the summary, whose root cause is the rank with the earliest timestamp."""
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": message, "timestamp": str(timestamp or int(time.time()))}
        record = {"message": {"message": message, "errorCode": 2, "extraInfo": extra}}
        Path(error_file).write_text(json.dumps(record))
    else:
        print(message, file=sys.stderr, flush=True)
