"""Start Python programs by forking a server that has imported torch, in place of a new interpreter for each.

A fresh interpreter spends 3 to 7 s of a core on imports, an agent of torchrun 3 s more; a forked one spends none. What
runs is the same: a process with its own arguments, environment, working directory, files, session and exit code. The ranks
that a forked agent or sweep starts are forked, too, and are children of it, because they find their agent by getppid and die
with it. Three things differ, so some launches of the tests stay cold: imports, the interpreter's finalization, and the seed of
string hashes, which all forks share.

`python tests/warm.py FD` is the server, listening on an inherited socket. `python tests/warm.py ask python|torchrun WORD...` is
the command, forked from the server at $DDP_LAB_TESTS_WARM; `... be torchrun WORD...` is the command itself, which forks its
ranks. Linux only.
"""

import atexit
import contextlib
import ctypes
import inspect
import json
import os
import runpy
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).parent.parent
ADDRESS = "DDP_LAB_TESTS_WARM"  # the variable that has the server's socket, for pytest and the processes it starts
STARTING = 60.0  # seconds that the server may take to import everything
NUMBER = struct.Struct("q")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Request(NamedTuple):
    """A process to start; its standard files travel beside it.

    Attributes:
        argv: as sys.argv; argv[0] is a script, or "-m" and argv[1] a module.
        owner: the process that must be its parent; None: the server looks after it and sends its exit status.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    new_session: bool
    owner: int | None


def program_of(args: list[str]) -> list[str] | None:
    """What this interpreter would run of a command: [script or "-m", ...]; None: it cannot be forked."""
    if not isinstance(args, list | tuple):
        return None
    words = [os.fspath(word) for word in args]
    if words[0] == str(Path(sys.executable).with_name("torchrun")):
        return ["-m", "torch.distributed.run", *words[1:]]
    if words[0] != sys.executable:
        return None
    words = words[2:] if words[1] == "-u" else words[1:]
    return words if words[0] == "-m" or words[0].endswith(".py") else None


class Warm(subprocess.Popen):
    """A Popen whose process is forked from the server at os.environ[ADDRESS], for programs of this repository.

    Its parent is the server's; the exit status comes over a socket.
    """

    def _execute_child(self, *given: Any) -> None:
        call = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments
        self.connection = ask(call, os.environ[ADDRESS])
        self.pid = receive(self.connection)
        close_pipes(self, call)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if flags == os.WNOHANG and not select.select([self.connection], [], [], 0)[0]:
            return 0, 0
        with self.connection:
            return self.pid, receive(self.connection)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            with contextlib.ExitStack() as stack:
                stack.callback(self._waitpid_lock.release)
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)
        return self.returncode


def ask(call: dict[str, Any], address: str, owner: int | None = None) -> socket.socket:
    """Sends what Popen._execute_child was given to the server at `address`. The first answer is the process's id."""
    env = dict(os.environ if call["env"] is None else call["env"])
    request = Request(program_of(call["args"]), env, os.fspath(call["cwd"] or os.getcwd()), call["start_new_session"], owner)
    files = [call[name] if call[name] != -1 else i for i, name in enumerate(("p2cread", "c2pwrite", "errwrite"))]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    data = json.dumps(request).encode()
    socket.send_fds(connection, [NUMBER.pack(len(data))], files)
    connection.sendall(data)
    return connection


def receive(connection: socket.socket) -> int:
    answer = connection.recv(NUMBER.size, socket.MSG_WAITALL)
    assert answer, "the server of warm launches has died"
    return NUMBER.unpack(answer)[0]


def close_pipes(process: subprocess.Popen, call: dict[str, Any]) -> None:
    names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._child_created = True
    process._close_pipe_fds(*(call[name] for name in names))


def fork_children() -> None:
    """From here on, what this process starts by subprocess is forked as well, from a server of its own that is forked now,
    while there are no threads yet."""
    address = f"{os.environ[ADDRESS]}.{os.getpid()}"
    owner, libc = os.getpid(), ctypes.CDLL(None)
    listener = socket.create_server(address, family=socket.AF_UNIX)
    if os.fork() == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for file in range(3):
            os.dup2(nowhere, file)
        if os.getppid() != owner:
            os._exit(0)
        run(serve(listener))
    listener.close()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # so that the forks' parent is this process
    cold = subprocess.Popen._execute_child

    def execute_child(process: subprocess.Popen, *given: Any) -> None:
        call = inspect.signature(cold).bind(process, *given).arguments
        if program_of(call["args"]) is None:
            return cold(process, *given)
        with ask(call, address, owner) as connection:
            process.pid = receive(connection)
        close_pipes(process, call)

    subprocess.Popen._execute_child = execute_child


def serve(listener: socket.socket) -> Request:
    """Forks a process for each request. Returns in the forks alone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # sent to all of a process's group or children, they mean the programs there
    while True:
        connection, _ = listener.accept()
        length, files, _, _ = socket.recv_fds(connection, NUMBER.size, 3)
        request = Request(*json.loads(connection.recv(*NUMBER.unpack(length), socket.MSG_WAITALL)))
        if (keeper := os.fork()) == 0:
            listener.close()
            if (pid := os.fork()) == 0:
                connection.close()
                settle(request, files)
                return request
            for file in files:
                os.close(file)
            connection.sendall(NUMBER.pack(pid))
            if request.owner is None:
                watch(pid, connection)
            os._exit(0)
        connection.close()
        for file in files:
            os.close(file)
        if request.owner is not None:
            os.waitpid(keeper, 0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def watch(pid: int, connection: socket.socket) -> None:
    """Sends the exit status. A process that nobody waits for any more is killed."""
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        connection.sendall(NUMBER.pack(status))


def settle(request: Request, files: list[int]) -> None:
    """Makes this fork a process of its own."""
    while request.owner is not None and os.getppid() != request.owner:
        time.sleep(0.0005)
    if request.new_session:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)


def run(request: Request) -> NoReturn:
    """The program, in a fork, to its end: with what is registered for an interpreter's exit, but without taking the modules
    apart, which would copy all of the server's memory first (0.5 s)."""
    code: Any = 0
    try:
        execute(request)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def execute(request: Request) -> None:
    sys.stdout.reconfigure(line_buffering=os.isatty(1) or bool(os.environ.get("PYTHONUNBUFFERED")))
    first, *words = request.argv
    given = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    starts_others = first != "-m" and (not first.endswith("train.py") or {"-m", "--multirun"} & set(words))
    if starts_others or words[:1] == ["torch.distributed.run"]:
        fork_children()
    if first == "-m":
        sys.modules.pop(words[0], None)  # runpy warns of what is imported already
        sys.argv = words
        sys.path[:] = [request.cwd, *given, *SEARCH]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *words]
        sys.path[:] = [str(Path(first).resolve().parent), *given, *SEARCH]
        runpy.run_path(first, run_name="__main__")


def shims(folder: Path) -> Path:
    """A folder for $PATH whose `python` and `torchrun` are forked, for commands that a shell starts; empty without a server."""
    return _write_shims(folder, "ask", "python", "torchrun")


def agent_shims(folder: Path) -> Path:
    """As `shims`, with a `torchrun` that is a child of the shell, as Slurm's jobs need it: its ranks alone are forked."""
    return _write_shims(folder, "be", "torchrun")


def _write_shims(folder: Path, how: str, *names: str) -> Path:
    folder.mkdir()
    for name in names if ADDRESS in os.environ else ():
        command = [sys.executable, *(["-S"] if how == "ask" else []), __file__, how, name]
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def stand_in(name: str, words: list[str]) -> NoReturn:
    """A shim's process: starts the command, and ends as it does."""
    command = [str(Path(sys.executable).with_name(name)), *words]
    if program_of(command) is None:
        os.execv(command[0], command)
    inherited = dict.fromkeys(("p2cread", "c2pwrite", "errwrite"), -1)
    connection = ask({"args": command, "env": None, "cwd": None, "start_new_session": False, **inherited}, os.environ[ADDRESS])
    receive(connection)  # the process's id
    code = os.waitstatus_to_exitcode(receive(connection))
    sys.exit(code if code >= 0 else 128 - code)  # as a shell has it


def start_server(address: str) -> subprocess.Popen:
    """Returns when it listens; it has still to import. It ends with this process."""
    listener = socket.create_server(address, family=socket.AF_UNIX)
    search = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = subprocess.Popen(
        [sys.executable, __file__, str(listener.fileno())],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": search},
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )
    listener.close()
    return server


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        stand_in(sys.argv[2], sys.argv[3:])
    if sys.argv[1] != "be":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    SEARCH = [path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "tests")]
    import gc

    import preload  # noqa: F401

    gc.freeze()  # what is there is never looked through again, so forks need not copy it
    if sys.argv[1] == "be":
        command = [str(Path(sys.executable).with_name(sys.argv[2])), *sys.argv[3:]]
        run(Request(program_of(command), dict(os.environ), os.getcwd(), False, None))
    run(serve(socket.socket(fileno=int(sys.argv[1]))))
