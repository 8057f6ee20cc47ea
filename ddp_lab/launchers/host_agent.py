"""The far side of `ddp-lab train --hosts`: checks a host, runs its launcher, and leaves no orphan.

The text of this file is sent over ssh to the Python interpreter of the host, which executes it. So
it imports only the standard library, and works where ddp_lab is missing or another version.

It gets a JSON object per line on its standard input, with what to do, and answers on its standard
output, where each of its lines begins with MARK. The launcher is tied to that connection: when the
input closes, or is silent for SILENCE seconds, the launcher gets SIGTERM, and what is left of it
and of all processes that it has started is killed GRACE seconds later. A cleaner, which is tied to
the agent in the same way, deletes the folder of the launch, also after the agent was killed.
"""

from __future__ import annotations  # this file is read by older versions of Python, too

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

MARK = "ddp-lab-host "  # what a login shell prints has no such beginning
SILENCE = 15.0  # seconds without a message after which the connection counts as lost
GRACE = 3.0  # seconds for which ranks may save a checkpoint after the connection was lost
TICK = 0.1  # seconds between looks at the launcher
DRAIN = 1.0  # seconds for the output of a launcher that has ended
CONNECT = 5.0  # seconds within which another host must answer
COUNT = 60.0  # seconds for the import of torch that counts the GPUs
MOST = 2**20  # bytes that wait to be sent; more are left in the pipes of the launcher
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SEARCH = "PYTHONPATH"  # a variable of Python; that of the host comes after the one it gets
# Deletes a folder when its standard input closes.
CLEANER = 'read -r line; rm -rf -- "$1"'
GPUS = "import torch; print(torch.cuda.device_count())"
SUFFIXES = (".py", ".yaml", ".toml", ".mplstyle")  # of the files of ddp_lab that are compared


def fingerprint(folder: str) -> dict[str, str]:
    """Return a hash of each source file of a package, by its path in it with slashes.

    Args:
        folder: path of the package. Links to folders in it are followed.
    """
    hashes: dict[str, str] = {}
    for parent, _, names in os.walk(folder, followlinks=True):
        for path in [Path(parent, name) for name in names if name.endswith(SUFFIXES)]:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            hashes[path.relative_to(folder).as_posix()] = digest[:12]
    return hashes


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def set_process(option: int, value: int) -> None:
    """Call prctl on Linux; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def die_with_agent() -> None:
    """Let the kernel kill the launcher when the agent dies; its ranks die with the launcher."""
    set_process(PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_descendants(but: int) -> None:
    """Kill every process below this one, which inherits those whose parents have ended.

    Args:
        but: process id of the one that is left alone.
    """
    import psutil  # a dependency of ddp_lab, which was found

    for each in psutil.Process().children(recursive=True):
        if each.pid != but:
            with suppress(psutil.NoSuchProcess):
                each.kill()


class Agent:
    """The state of a host: the connection, and the launcher once it was started."""

    def __init__(self) -> None:
        self.received = b""
        self.to_send = b""
        self.heard = time.monotonic()
        self.listener: socket.socket | None = None
        self.launcher: subprocess.Popen[bytes] | None = None
        self.cleaner: subprocess.Popen[bytes] | None = None
        self.lines: dict[int, bytes] = {}
        self.folder = ""
        self.deadline: float | None = None
        self.is_connected = True
        self.environment = dict(os.environ)
        self.selector = selectors.DefaultSelector()
        self.requests: dict[str, Callable[..., None]] = {
            "check": self.check,
            "time": self.tell_time,
            "listen": self.listen,
            "connect": self.connect,
            "start": self.start,
            "signal": self.signal,
            "end": self.end,
            "alive": self.stay,
        }

    def say(self, kind: str, **facts: Any) -> None:
        """Send an answer, as soon as the connection takes it."""
        if self.is_connected:
            line = MARK + json.dumps({"say": kind, **facts}) + "\n"
            self.to_send += line.encode()

    def check(self, directory: str, environment: Mapping[str, str], count_gpus: bool) -> None:
        """Enter the directory of the launch, and say what there is for it on this host."""
        paths = [environment.get(SEARCH, ""), self.environment.get(SEARCH, "")]
        search = os.pathsep.join(filter(None, paths))
        self.environment.update({**environment, SEARCH: search})
        try:
            os.chdir(directory)
        except OSError as error:
            self.say("checked", directory=error.strerror)
            return
        sys.path[:0] = [directory, *filter(None, search.split(os.pathsep))]
        package = importlib.util.find_spec("ddp_lab")
        folders = list(package.submodule_search_locations or []) if package else []
        self.say(
            "checked",
            directory=None,
            python=sys.executable,
            ddp_lab=version_of("ddp_lab"),
            folder=folders[0] if folders else None,
            files=fingerprint(folders[0]) if folders else {},
            torch=version_of("torch"),
            gpus=self.count_gpus() if count_gpus and version_of("torch") else None,
        )

    def count_gpus(self) -> int | str:
        """Return the number of GPUs that torch sees, or the text of its error."""
        try:
            done = subprocess.run(
                [sys.executable, "-c", GPUS],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COUNT,
            )
        except subprocess.TimeoutExpired:
            return f"import torch took longer than {COUNT:.0f} s"
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["no error"])[-1]
        return int(done.stdout)

    def tell_time(self) -> None:
        """Say what the clock of this host shows, in seconds since 1970."""
        self.say("time", now=time.time())

    def listen(self, port: int) -> None:
        """Take a port, by default a free one, until the launcher is started."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            self.listener = socket.create_server(("", port), family=family, dualstack_ipv6=both)
        except OSError as error:
            self.say("listening", port=port, error=os.strerror(error.errno or 0))
            return
        self.say("listening", port=self.listener.getsockname()[1], error=None)

    def connect(self, host: str, port: int) -> None:
        """Say whether a port of another host can be reached from this one."""
        try:
            socket.create_connection((host, port), timeout=CONNECT).close()
        except OSError as error:
            self.say("connected", error=str(error))
            return
        self.say("connected", error=None)

    def start(self, arguments: Sequence[str], wants_outcome: bool) -> None:
        """Start the launcher of this host.

        Args:
            arguments: of `ddp-lab train`.
            wants_outcome: whether its --json file is to be sent back.
        """
        if self.listener:
            self.listener.close()
        self.folder = tempfile.mkdtemp(prefix="ddp-lab-host-")
        self.cleaner = subprocess.Popen(
            ["sh", "-c", CLEANER, "sh", self.folder],
            stdin=subprocess.PIPE,  # only this process has its other end
            start_new_session=True,
        )
        # Where the launcher writes its error, in the form that a rank uses.
        self.environment["TORCHELASTIC_ERROR_FILE"] = os.path.join(self.folder, "error.json")
        self.environment["PYTHONUNBUFFERED"] = "1"
        # torch's launcher would leave its own folder behind
        arguments = ["--log-dir", self.folder, *arguments]
        if wants_outcome:
            arguments = ["--json", os.path.join(self.folder, "outcome.json"), *arguments]
        set_process(PR_SET_CHILD_SUBREAPER, 1)
        launcher = subprocess.Popen(
            [sys.executable, "-m", "ddp_lab", "train", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # the signals of the agent's group are not for it
            preexec_fn=die_with_agent,
        )
        self.launcher = launcher
        assert launcher.stdout
        assert launcher.stderr
        for number, pipe in ((1, launcher.stdout), (2, launcher.stderr)):
            self.lines[number] = b""
            self.selector.register(pipe, selectors.EVENT_READ, number)
        self.say("started")

    def signal(self, number: int) -> None:
        """Pass a signal on to the launcher, which passes it on to its ranks."""
        if self.launcher and self.launcher.poll() is None:
            self.launcher.send_signal(number)

    def end(self, seconds: float) -> None:
        """Ask the launcher to end, and kill what is left of it after so many seconds."""
        deadline = time.monotonic() + seconds
        if self.deadline is None:
            self.signal(signal.SIGTERM)
            self.deadline = deadline
        self.deadline = min(self.deadline, deadline)

    def stay(self) -> None:
        """Do nothing: the other side shows that it is connected."""

    def lose(self) -> None:
        """End the launch, because nobody is connected any more."""
        if self.is_connected:
            self.is_connected = False
            self.to_send = b""
            self.selector.unregister(sys.stdin)
            self.end(GRACE)

    def read_requests(self) -> None:
        """Do what the next messages ask for. The end of the input is the end of the launch."""
        try:
            data = os.read(sys.stdin.fileno(), 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.lose()
            return
        self.heard = time.monotonic()
        *lines, self.received = (self.received + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            self.requests[request.pop("do")](**request)

    def read_output(self, pipe: IO[bytes], number: int) -> None:
        """Pass on complete lines of the launcher's stdout (1) or stderr (2)."""
        data = os.read(pipe.fileno(), 65536)
        if not data:
            self.selector.unregister(pipe)
        *lines, self.lines[number] = (self.lines[number] + data).split(b"\n")
        if not data and self.lines[number]:
            lines.append(self.lines[number])  # without a newline at its end
        for line in lines:
            self.say("line", stream=number, text=line.decode(errors="replace"))

    def send(self) -> None:
        """Send what waits, as much as the connection takes without waiting."""
        try:
            sent = os.write(sys.stdout.fileno(), self.to_send)
        except BlockingIOError:
            return
        except OSError:  # its reader has gone
            self.lose()
            return
        self.to_send = self.to_send[sent:]

    def run(self) -> None:
        """Serve the connection until the launcher has ended or, without one, the input closes."""
        # neither a silent connection nor one that takes nothing may stop the look at the clock
        os.set_blocking(sys.stdin.fileno(), False)
        os.set_blocking(sys.stdout.fileno(), False)
        self.selector.register(sys.stdin, selectors.EVENT_READ, 0)
        self.say("hello")
        while self.is_connected or self.launcher:
            self.serve()
            if self.is_connected and time.monotonic() - self.heard > SILENCE:
                self.lose()
            if self.launcher is None and self.deadline is not None:
                return
            if self.cleaner and self.deadline is not None and time.monotonic() > self.deadline:
                kill_descendants(but=self.cleaner.pid)
            if self.launcher and self.launcher.poll() is not None:
                break
        self.finish()

    def serve(self) -> None:
        """Read and send what can be read and sent now."""
        for key, _ in self.selector.select(TICK if not self.to_send else TICK / 5):
            if key.data == 0:
                self.read_requests()
            elif len(self.to_send) < MOST:
                self.read_output(key.fileobj, key.data)  # pyright: ignore[reportArgumentType]
        if self.to_send:
            self.send()

    def finish(self) -> None:
        """Kill what the launcher has left, and say how it has ended."""
        if not (self.launcher and self.cleaner):
            return
        kill_descendants(but=self.cleaner.pid)
        limit = time.monotonic() + DRAIN
        while any(key.data for key in self.selector.get_map().values()):
            self.serve()
            if time.monotonic() > limit:
                break
        self.say(
            "ended",
            code=self.launcher.returncode,
            error=self.read_json("error.json"),
            outcome=self.read_json("outcome.json"),
        )
        self.cleaner.communicate()
        limit = time.monotonic() + SILENCE
        while self.to_send and time.monotonic() < limit:
            self.send()
            time.sleep(TICK / 10)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the content of a file of the launcher; None if it has written none."""
        try:
            return json.loads(Path(self.folder, name).read_text())
        except (OSError, ValueError):
            return None


def main() -> None:
    """Serve the connection that has started this process."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    agent = Agent()
    # of this host, for example at a shutdown
    signal.signal(signal.SIGTERM, lambda number, frame: agent.end(GRACE))
    agent.run()


if __name__ == "__main__":
    main()
