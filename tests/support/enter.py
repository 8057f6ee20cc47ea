"""`enter.py PID MODULE ARGUMENT...`: run a module in the namespaces of another process.

Started by the `python` of warm.py, it is forked, and so are the ranks of a launch. Linux only; it
needs the right to enter namespaces.
"""

import ctypes
import os
import sys
from pathlib import Path

import warm

NAMESPACES = ("net", "uts", "mnt")


def enter(pid: str) -> None:
    """Let this process have the network, the host name and the mounts of another one.

    Raises:
        OSError: It has ended, or this user may not enter.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # all are opened first: /proc may be another one in the last namespace
    files = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    folder = os.getcwd()
    for file, name in zip(files, NAMESPACES, strict=True):
        if libc.setns(file, 0):
            error = ctypes.get_errno()
            raise OSError(error, f"setns {name} of {pid}: {os.strerror(error)}")
        os.close(file)
    os.chdir(folder)  # the mounts of another process begin at its root


def main() -> None:
    _, pid, *program = sys.argv
    enter(pid)
    if warm.VARIABLE not in os.environ:
        os.execv(sys.executable, [sys.executable, "-m", *program])
    warm.SEARCH = [path for path in sys.path if Path(path or ".").resolve() not in warm.OWN]
    warm.execute(program)


if __name__ == "__main__":
    main()
