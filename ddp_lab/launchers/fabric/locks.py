"""Fault: a file system without locks for the run directories.

A run directory has one writer, which a POSIX lock ensures. Lustre without the mount option flock,
NFS with nolock and some FUSE systems refuse it, or grant it on each machine.
"""

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_lab.launchers.fabric.child import Answer, Child
from ddp_lab.launchers.preflight import Finding
from ddp_lab.world.ranks import Ranks

ABOUT = "locks"
FILE = ".fabric.lock"
REMEDY = (
    "Two launches could write in one run directory. Mount the file system with locks (Lustre: "
    "-o flock, NFS: without nolock), or use a runs_dir on another one"
)
Lock = Callable[[Any, int], None]


def take_lock(kept: dict[str, Any], path: Path, lock: Lock) -> bool:
    """Lock a file until `release_lock`; return whether no other process has locked it.

    Args:
        kept: what the process keeps.
        path: of the file.
        lock: fcntl.lockf.

    Raises:
        OSError: the file system has no locks, or the file cannot be written.
    """
    file = path.open("a+")
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either
        file.close()
        return False
    except OSError:
        file.close()
        raise
    kept["lock"] = file
    return True


def release_lock(kept: dict[str, Any]) -> None:
    """Release the lock of this process, if it has one."""
    if "lock" in kept:
        kept.pop("lock").close()


def check_locks(runtime: Ranks, child: Child, folder: Path, lock: Lock) -> Finding:
    """Return a finding about the locks in a folder. Collective.

    Rank 0 locks a file there, which no other rank may lock then.

    Args:
        runtime: the ranks.
        child: of this rank.
        folder: the config's `runs_dir`.
        lock: fcntl.lockf.
    """
    name = f"{FILE}-{socket.gethostname()}-{os.getpid()}"
    path = folder / runtime.broadcast_from_rank0("lock", lambda: name)
    first = child.call(take_lock, path, lock) if runtime.is_main else Answer()
    problem = runtime.broadcast_from_rank0("locked", lambda: first.problem)
    granted = False
    if not problem and not runtime.is_main:
        second = child.call(take_lock, path, lock)
        problem = second.problem
        granted = bool(second.value)
        child.call(release_lock)
    here = socket.gethostname()
    problems = runtime.gather_and_decide(
        "locks", [here, problem, granted], lambda by_rank: explain(folder, by_rank)
    )
    if runtime.is_main:
        child.call(release_lock)
        path.unlink(missing_ok=True)
    if problems:
        return Finding("warning", ABOUT, f"{problems}. {REMEDY}")
    return Finding("ok", ABOUT, f"{folder} has locks")


def explain(folder: Path, by_rank: list[Any]) -> str:
    """Return what is wrong with the locks in a folder; "" if nothing is.

    Args:
        folder: the config's `runs_dir`.
        by_rank: host, problem, and whether the rank got a lock that another one has.
    """
    for host, problem, _ in by_rank:
        if problem:
            return f"runs_dir={folder}: its files cannot be locked on {host} ({problem})"
    for host, _, granted in by_rank:
        if granted:
            return f"runs_dir={folder}: {host} got a lock that rank 0 on {by_rank[0][0]} has"
    return ""
