"""Start Python programs by forking a server that has imported torch.

A new interpreter spends 3 to 7 s of CPU time on imports and torchrun's agent another 3 s; a forked
process spends none. The server writes programs named `python`, `torchrun` and `ddp-lab` into
PROGRAMS. Whoever runs them gets an ordinary process (ask.py) for which the server forks the
program, with the same arguments, environment, directory and files. torchrun's agent forks its ranks
itself, because they find it by getppid and die with it. Three things differ from a new interpreter,
so some tests start theirs cold: imports, the interpreter's finalization (unless FINALIZE is set),
and the seed of string hashes, which all forks share. preload.py leaves out what would only cost
time. What multiprocessing spawns in such a program is forked, too.

`warm.py agent ARGUMENT...` runs torchrun in its own process and forks its ranks, for Slurm's jobs.
Linux only.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import logging
import marshal
import multiprocessing
import multiprocessing.util
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ask import WORKER, program_of

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
OWN = (ROOT, SUPPORT)  # which programs find only as a new interpreter would
SEARCH: list[str] = []  # where programs find packages
# the folder with the server's socket and programs, for pytest and its subprocesses
VARIABLE = "DDP_LAB_TESTS_WARM"
FINALIZE = "DDP_LAB_TESTS_FINALIZE"
HUGE_PAGE = 2**21
MADV_COLLAPSE = 25
HAS_GPUS = Path("/dev/nvidiactl").exists()  # CUDA may not be used in a fork after it was used
MOST_FILES = 250  # that a message can pass on
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1


def programs() -> Path:
    """Return the folder of `python`, `torchrun` and `ddp-lab`, forked ones if there is a server."""
    return Path(os.environ.get(VARIABLE, Path(sys.executable).parent))


def start_server(folder: Path) -> subprocess.Popen:
    """Start the server, which ends with this process.

    It already listens, but still imports, when this returns.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "socket"))
    listener.listen(128)
    ask = [sys.executable, "-S", str(SUPPORT / "ask.py"), str(folder / "socket")]
    for name in ("python", "torchrun", "ddp-lab"):
        write_program(folder / name, [*ask, name])
    write_program(folder / "agent" / "torchrun", [sys.executable, __file__, "agent"])
    write_program(folder / "agent" / "python", [*ask, "python"])
    os.environ[VARIABLE] = str(folder)
    search = os.pathsep.join(
        [str(ROOT), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    settings = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # torch 2.11's compiler asks for a GPU when it is imported, after which no fork may use one;
        # asked by NVML, it may
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONPATH": search,
    }
    with listener:
        return subprocess.Popen(
            [sys.executable, __file__, "serve", str(listener.fileno()), str(os.getpid())],
            env=os.environ | settings,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )


def write_program(path: Path, command: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)


def serve(listener: socket.socket) -> NoReturn:
    """Fork a process for each request.

    Kill it if its client goes, and tell its client how it ends.
    """
    for number in SIGNALS:
        # signals to a process group are meant for the programs, not the server
        signal.signal(number, signal.SIG_IGN)
    with selectors.DefaultSelector() as selector:

        def accept() -> None:
            client, _ = listener.accept()
            request, files, _, _ = socket.recv_fds(client, 2**20, MOST_FILES)
            if (pid := os.fork()) == 0:
                run_for(client, files, marshal.loads(request))
            for file in files:
                os.close(file)
            ended = os.pidfd_open(pid)
            selector.register(ended, selectors.EVENT_READ, lambda: end(ended, pid, client))
            selector.register(client, selectors.EVENT_READ, lambda: lose(pid, client))

        def lose(pid: int, client: socket.socket) -> None:
            selector.unregister(client)
            os.kill(pid, signal.SIGKILL)

        def end(ended: int, pid: int, client: socket.socket) -> None:
            selector.unregister(ended)
            os.close(ended)
            _, status = os.waitpid(pid, 0)
            with client:
                if client in selector.get_map():
                    selector.unregister(client)
                    client.send(str(status).encode())

        selector.register(listener, selectors.EVENT_READ, accept)
        while True:
            for key, _ in selector.select():
                if key.fileobj in selector.get_map():  # one event may end what another one is about
                    key.data()


def run_for(client: socket.socket, files: list[int], request: dict[str, Any]) -> NoReturn:
    """Run the program of a request in this fork of the server, in its own session."""
    os.setsid()
    client.send(str(os.getpid()).encode())
    # none of the files may lie where another one belongs
    copies = [
        fcntl.fcntl(file, fcntl.F_DUPFD, MOST_FILES + max(request["files"])) for file in files
    ]
    for copy, number in zip(copies, request["files"], strict=True):
        os.dup2(copy, number)
    os.chdir(request["cwd"])
    become(request["env"], request["files"][3:])
    run(request["program"])


def become(environment: dict[str, str], files: Sequence[int] = ()) -> None:
    """Let a forked process have only its standard files and others, usual signal handlers, an
    environment.
    """
    first = 3
    for file in sorted(files):
        os.closerange(first, file)
        first = file + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
    for number in SIGNALS:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    os.environ.clear()
    os.environ.update(environment)


def run(program: list[str]) -> NoReturn:
    """Run a program in a forked process and exit.

    Exit handlers run, but the modules are torn down only if FINALIZE is in the environment, because
    that copies all of the server's memory (0.5 s).
    """
    code: Any = 1
    try:
        try:
            execute(program)
            code = 0
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
        if code is not None and not isinstance(code, int):
            code = print(code, file=sys.stderr) or 1
        if FINALIZE in os.environ:
            ctypes.pythonapi.Py_Exit(int(code or 0))
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    # also if nobody reads the output any more: the interpreter's own exit would wait for torch's
    # store forever
    finally:
        os._exit(code if isinstance(code, int) else code is not None)


def execute(program: list[str]) -> None:
    """Run a script or a module as the interpreter would.

    The programs that it starts by sys.executable are forked, too.
    """
    sys.stdout.reconfigure(line_buffering=os.isatty(1) or bool(os.environ.get("PYTHONUNBUFFERED")))
    name = program[0]
    if name == "execnet":
        sys.path[:] = ["", *SEARCH]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(WORKER, main.__dict__)
        return
    is_script = program[0].endswith(".py")
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [
        str(Path(name).resolve().parent) if is_script else os.getcwd(),
        *filter(None, inherited),
        *SEARCH,
    ]
    sys.argv = program
    sys.executable = str(programs() / "python")
    multiprocessing.set_executable(sys.executable)
    # from where what is spawned reads the script; of the server, it is another directory
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()
    if name == "multiprocessing.spawn":
        _, command, *sys.argv[1:] = program
        exec(command)
        return
    if is_script:
        # not by runpy, which would free what the script has made before the interpreter ends
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        main.__file__ = name
        exec(compile(Path(name).read_text(), name, "exec"), main.__dict__)
        return
    # Not by runpy: torch's agent calls inspect.stack(), which looks at all modules for every frozen
    # frame (0.7 s).
    handler = importlib.import_module(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    )
    handler.SubprocessHandler._popen = Rank
    sys.modules["ddp_lab.__main__" if name == "ddp_lab" else name].main()


def prepare_to_fork() -> None:
    """Make the forks of this process quick.

    The garbage collector skips existing objects, so their memory is not copied in forks. The memory
    is put into pages of 2 MiB, whose table a fork copies in a third of the time (12 in place of
    34 ms). What a fork writes to is copied in pages of 4 KiB, as before. Kernels before Linux 6.1
    keep their small pages.
    """
    forget_exit_handlers()
    gc.freeze()
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, access, _, _, file, *name = line.split()
        if access.startswith("rw") and file == "0" and name in ([], ["[heap]"]):
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            first = -(-start // HUGE_PAGE) * HUGE_PAGE
            for address in range(first, end - HUGE_PAGE + 1, HUGE_PAGE):
                madvise(address, HUGE_PAGE, MADV_COLLAPSE)


def forget_exit_handlers() -> None:
    """Leave out what the imported packages would do at exit, which takes 18 ms of each fork.

    torch would remove its operators one by one, nanobind would look for leaks, the compiler would
    add up its times. Forks exit without tearing modules down, so none of it has an effect.
    """
    weakref.finalize._registry.clear()
    atexit._clear()
    workers_of_loaders = sys.modules["torch.utils.data._utils"]
    for handler in (
        logging.shutdown,
        weakref.finalize._exitfunc,
        workers_of_loaders._set_python_exit_flag,
        multiprocessing.util._exit_function,
    ):
        atexit.register(handler)


class Rank:
    """What torch's agent uses of the Popen of a rank, for one that is forked from the agent."""

    def __init__(self, command: tuple[str, ...], environment: dict[str, str]):
        self.returncode: int | None = None
        with warnings.catch_warnings():
            # the agent has threads, of which the rank needs none
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            logging.disable(logging.NOTSET)  # which the agent of ddp-lab has disabled for itself
            for finalizer in list(weakref.finalize._registry):
                finalizer.atexit = False  # the agent's, of its temporary folder
            become(environment)
            run(program_of("python", list(command[1:])))

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.02)
        return code


if __name__ == "__main__":
    process, *arguments = sys.argv[1:]
    SEARCH = [path for path in sys.path if Path(path or ".").resolve() not in OWN]
    importlib.import_module("preload_rank" if process == "agent" else "preload")
    prepare_to_fork()
    if process == "agent":
        run(["torch.distributed.run", *arguments])
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # it ended before this call, while the modules were imported
    if os.getppid() != int(arguments[1]):
        sys.exit()
    serve(socket.socket(fileno=int(arguments[0])))
