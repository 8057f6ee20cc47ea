"""`ask.py SOCKET PROGRAM ARGUMENT...`: run a program as a fork of the server of warm.py.

This process passes signals on to the fork's process group, and ends as the fork ends. If it is
killed, so is the fork. What the server does not run is run by a new interpreter. Nothing is
imported that would take long.
"""

import contextlib
import json
import os
import signal
import socket
import sys

MODULES = {"torchrun": "torch.distributed.run", "ddp-lab": "ddp_lab"}


# how multiprocessing starts a process with the method "spawn", which inherits open files
SPAWN = "from multiprocessing.spawn import spawn_main; "


def inherited_files() -> list[int]:
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    return [file for file in files if file > 2 and is_inheritable(file)]


def is_inheritable(file: int) -> bool:
    try:
        return os.get_inheritable(file)
    except OSError:  # the folder that was listed, which is closed
        return False


def program_of(name: str, arguments: list[str]) -> list[str] | None:
    """Return the script or module that a command runs and its arguments; None for others."""
    if name in MODULES:
        return [MODULES[name], *arguments]
    for number, argument in enumerate(arguments):  # after options of the interpreter, as -B
        if argument.startswith(SPAWN):
            return ["multiprocessing.spawn", *arguments[number:]]
    first, *rest = arguments[arguments[:1] == ["-u"] :] or [""]
    if first == "-m" and rest and rest[0] in MODULES.values():
        return rest
    return [first, *rest] if first.endswith(".py") and "site-packages" not in first else None


def main() -> None:
    address, name, *arguments = sys.argv[1:]
    program = program_of(name, arguments)
    if program is None:
        real = os.path.join(os.path.dirname(sys.executable), name)
        os.execv(real, [real, *arguments])
    files = inherited_files() if program[0] == "multiprocessing.spawn" else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        request = {
            "program": program,
            "cwd": os.getcwd(),
            "env": dict(os.environ),
            "files": [0, 1, 2, *files],
        }
        socket.send_fds(server, [json.dumps(request).encode()], request["files"])
        pid = int(server.recv(32))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: os.killpg(pid, number))
        status = int(server.recv(32))
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
