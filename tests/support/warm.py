"""Start Python programs by forking a server that has imported torch, instead of starting a new interpreter for each.

A new interpreter spends 3 to 7 s of CPU time on imports and torchrun's agent another 3 s; a forked process spends none. The
forked program runs as usual, in a process with its own arguments, environment, working directory, files, session and exit code.
The ranks that a forked agent or sweep starts are forked, too. They are its children, because ranks find their agent by getppid
and die with it. Three things differ, so some tests start their launches cold: imports, the interpreter's finalization, and the
seed of string hashes, which all forks share. preload.py leaves out what would only cost time.

`warm.py FD` runs the server on an inherited socket. `warm.py ask python|torchrun ARGUMENT...` runs the command as a fork of the
server at $DDP_LAB_TESTS_WARM. `warm.py be torchrun ARGUMENT...` runs torchrun in its own process, which forks its ranks.
Linux only.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import secrets
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

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
ADDRESS = "DDP_LAB_TESTS_WARM"  # environment variable with the path of the server's socket, for pytest and its subprocesses
MACHINE = "DDP_LAB_TESTS_MACHINE"  # the same with the id of a process whose namespaces a program enters
NUMBER = struct.Struct("q")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
COLD = subprocess.Popen._execute_child


class Request(NamedTuple):
    """A process to start. Its standard files are sent with the request.

    Attributes:
        argv: Like sys.argv; argv[0] is a script, or argv[0] is "-m" and argv[1] a module.
        owner: Id of the process that becomes its parent; None if the server waits for it and sends the exit status.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    new_session: bool
    owner: int | None


def program_of(args: list[str]) -> list[str] | None:
    """Return the arguments of this interpreter that are equivalent to a command; None if the command cannot be forked."""
    if not isinstance(args, list | tuple):
        return None
    command = [os.fspath(argument) for argument in args]
    if command[0] == str(Path(sys.executable).with_name("torchrun")):
        return ["-m", "torch.distributed.run", *command[1:]]
    if command[0] == str(Path(sys.executable).with_name("ddp-lab")):
        return ["-m", "ddp_lab", *command[1:]]
    if command[0] != sys.executable:
        return None
    program = command[2:] if command[1] == "-u" else command[1:]
    return program if program[0] == "-m" or program[0].endswith(".py") else None


class Warm(subprocess.Popen):
    """A Popen whose process is forked from the server at os.environ[ADDRESS], for programs of this repository.

    Its parent is a process of the server, which sends the exit status over a socket.
    """

    def _execute_child(self, *given: Any) -> None:
        call = inspect.signature(COLD).bind(self, *given).arguments
        self.connection = ask(call, os.environ[ADDRESS])
        self.pid = receive(self.connection)
        close_pipes(self, call)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if flags == os.WNOHANG and not select.select([self.connection], [], [], 0)[0]:
            return 0, 0
        with self.connection:
            answer = self.connection.recv(NUMBER.size, socket.MSG_WAITALL)
            return self.pid, NUMBER.unpack(answer)[0] if answer else signal.SIGKILL  # whoever waits for it was killed, too

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
    """Send the arguments of Popen._execute_child to the server at `address`. The first answer is the id of the new process."""
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
    """Return the next number from the server: a process id or an exit status."""
    answer = connection.recv(NUMBER.size, socket.MSG_WAITALL)
    assert answer, "the server of warm launches has died"
    return NUMBER.unpack(answer)[0]


def close_pipes(process: subprocess.Popen, call: dict[str, Any]) -> None:
    """Close the child's ends of the pipes, as Popen._execute_child does."""
    names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._child_created = True
    process._close_pipe_fds(*(call[name] for name in names))


def fork_children() -> None:
    """Make this process fork the programs that it starts with `subprocess`.

    They are forked from a server of its own, which is forked here, before this process has any threads.
    """
    address = f"{os.environ[ADDRESS]}.{secrets.token_hex(8)}"  # process ids repeat in PID namespaces
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
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # so that this process becomes the parent of the forked programs

    def execute_child(process: subprocess.Popen, *given: Any) -> None:
        call = inspect.signature(COLD).bind(process, *given).arguments
        if program_of(call["args"]) is None:
            return COLD(process, *given)
        with ask(call, address, owner) as connection:
            process.pid = receive(connection)
        close_pipes(process, call)

    subprocess.Popen._execute_child = execute_child


def serve(listener: socket.socket) -> Request:
    """Fork a process for each request. Only the forked processes return."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # signals to a process group are meant for the programs, not the server
    while True:
        connection, _ = listener.accept()
        length, files, _, _ = socket.recv_fds(connection, NUMBER.size, 3)
        request = Request(*json.loads(connection.recv(*NUMBER.unpack(length), socket.MSG_WAITALL)))
        if (keeper := os.fork()) == 0:
            listener.close()
            if (pid := os.fork()) == 0:
                set_up(request, files)
                if request.owner is not None:  # only now, because its owner can wait for it only after becoming its parent
                    connection.sendall(NUMBER.pack(os.getpid()))
                connection.close()
                return request
            for file in files:
                os.close(file)
            if request.owner is None:
                connection.sendall(NUMBER.pack(pid))
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
    """Wait for a process and send its exit status; kill the process if the client closes the connection."""
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        connection.sendall(NUMBER.pack(status))


def set_up(request: Request, files: list[int]) -> None:
    """Set up a forked process: parent, session, files, signal handlers, working directory, environment."""
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
    for kind in ("net", "uts", "mnt") if MACHINE in request.env else ():
        namespace = os.open(f"/proc/{request.env[MACHINE]}/ns/{kind}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns", kind)
        os.close(namespace)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)


def run(request: Request) -> NoReturn:
    """Run the program in a forked process and exit.

    Exit handlers run, but the modules are not torn down, which would first copy all of the server's memory (0.5 s).
    """
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
    """Run the program as the interpreter would."""
    sys.stdout.reconfigure(line_buffering=os.isatty(1) or bool(os.environ.get("PYTHONUNBUFFERED")))
    first, *arguments = request.argv
    given = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    module = arguments[0] if first == "-m" else None
    alone = module or first.endswith(("train.py", "rank.py"))  # a single process, unless it sweeps or starts ranks
    starts = {"-m", "--multirun"} & set(arguments) or any(argument.startswith("--nproc") for argument in arguments)
    if starts or module == "torch.distributed.run" or not alone:
        fork_children()
    if module in ("torch.distributed.run", "ddp_lab"):
        # Not by runpy: torch's agent calls inspect.stack(), which looks at all modules for every frozen frame (0.7 s).
        sys.argv = arguments
        sys.path[:] = [request.cwd, *given, *SEARCH]
        sys.modules["ddp_lab.__main__" if module == "ddp_lab" else module].main()
    elif module:
        sys.modules.pop(module, None)  # runpy warns about what is imported
        sys.argv = arguments
        sys.path[:] = [request.cwd, *given, *SEARCH]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *arguments]
        sys.path[:] = [str(Path(first).resolve().parent), *given, *SEARCH]
        runpy.run_path(first, run_name="__main__")


def shims(folder: Path) -> Path:
    """Create a folder for $PATH whose `python`, `torchrun` and `ddp-lab` are forked; it is empty without a server."""
    return _write_shims(folder, python="ask", torchrun="ask", **{"ddp-lab": "ask"})


def agent_shims(folder: Path) -> Path:
    """Create the same, but `torchrun` is a child of the shell, as Slurm jobs need it, and only its ranks are forked."""
    return _write_shims(folder, python="ask", torchrun="be")


def _write_shims(folder: Path, **programs: str) -> Path:
    folder.mkdir()
    for name, how in programs.items() if ADDRESS in os.environ else ():
        command = [sys.executable, *(["-S"] if how == "ask" else []), __file__, how, name]
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def stand_in(name: str, arguments: list[str]) -> NoReturn:
    """Run the process of a shim: start the command and exit with its exit code."""
    command = [str(Path(sys.executable).with_name(name)), *arguments]
    if program_of(command) is None:
        os.execv(command[0], command)
    code = Warm(command).wait()
    sys.exit(code if code >= 0 else 128 - code)  # as in a shell


def start_server(address: str) -> subprocess.Popen:
    """Start the server, which ends with this process. It already listens, but still imports, when this returns."""
    listener = socket.create_server(address, family=socket.AF_UNIX)
    search = os.pathsep.join([str(ROOT), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
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
    SEARCH = [path for path in sys.path if Path(path or ".").resolve() not in (ROOT, SUPPORT)]
    importlib.import_module("preload_rank" if sys.argv[1] == "be" else "preload")
    gc.freeze()  # the garbage collector skips existing objects, so their memory is not copied in forks
    if sys.argv[1] == "be":
        command = [str(Path(sys.executable).with_name(sys.argv[2])), *sys.argv[3:]]
        run(Request(program_of(command), dict(os.environ), os.getcwd(), False, None))
    run(serve(socket.socket(fileno=int(sys.argv[1]))))
