"""`ask.py SOCKET PROGRAM ARGUMENT...`: run a program as a fork of the server of warm.py.

This process passes signals on to the fork's process group, and ends as the fork ends. If it is
killed, so is the fork. What the server does not run is run by a new interpreter. Only modules that
are written in C are imported: json, signal and socket take three times as long as the rest.
"""

import _signal
import _socket
import marshal
import os
import sys

MODULES = {"torchrun": "torch.distributed.run", "ddp-lab": "ddp_lab"}


# how pytest-xdist starts a process that runs tests
WORKER = "import sys;exec(eval(sys.stdin.readline()))"
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
        if argument == WORKER:
            return ["execnet"]
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
    request = {
        "program": program,
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "files": [0, 1, 2, *files],
    }
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    server.connect(address)
    numbers = b"".join(file.to_bytes(4, sys.byteorder) for file in request["files"])
    server.sendmsg([marshal.dumps(request)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
    pid = int(server.recv(32))
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGUSR1):
        _signal.signal(number, lambda number, frame: os.killpg(pid, number))
    status = int(server.recv(32))
    if os.WIFSIGNALED(status):
        end_by(os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def end_by(number: int) -> None:
    """End this process by a signal."""
    if number != _signal.SIGKILL:  # which has no handler
        _signal.signal(number, _signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
