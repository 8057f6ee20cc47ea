"""The connection to a host over the system's ssh, and the agent on its other side.

What reaches the remote shell is one constant program and the path of the interpreter, quoted. The
agent (host_agent.py) and all that it gets pass through standard input.
"""

import json
import shlex
import subprocess
import threading
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from ddp_lab.launchers import host_agent

AGENT = Path(host_agent.__file__)
# Reads the text of the agent, which comes after its length, and nothing of what follows it.
BOOTSTRAP = (
    "f = open(0, 'rb', 0, closefd=False); "
    "exec(b''.join(f.read(1) for _ in range(int(f.readline()))))"
)
# ssh takes the first value of an option, so what the user's --ssh sets has precedence.
OPTIONS = [
    "-T",
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
    *("-o", "ClearAllForwardings=yes"),
]
RESOLVE = 10.0  # seconds for `ssh -G`, which reads ssh's config
BEAT = 1.0  # seconds between messages by which a host knows that this command is alive
LEAVE = 3.0  # seconds for ssh to end after its input was closed
KEPT = 5  # lines of ssh's stderr that are kept for a message


class Answer(NamedTuple):
    """What a host has said.

    Attributes:
        host: Its name.
        kind: As in host_agent.py; "lost" at the end of the connection; "line" for output.
        facts: Of this kind.
        at: When it was read, in seconds as time.time() counts them.
    """

    host: str
    kind: str
    facts: dict[str, Any]
    at: float = 0.0


class Connection:
    """A running ssh to one host, whose answers go to a queue.

    Args:
        ssh: The command of --ssh, split.
        host: What ssh gets as the host.
        python: Path of the interpreter on the host.
        answers: Gets what the host says.
    """

    def __init__(self, ssh: Sequence[str], host: str, python: str, answers: "SimpleQueue[Answer]"):
        self.host = host
        self.answers = answers
        self.errors = list[str]()
        self.is_started = False
        self.lock = threading.Lock()
        remote = f"exec {shlex.quote(python)} -c {shlex.quote(BOOTSTRAP)}"
        self.process = subprocess.Popen(
            [*ssh, *OPTIONS, "--", host, remote],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this command, which passes it on
        )
        self.readers = [
            threading.Thread(target=read, name=f"{read.__name__} {host}", daemon=True)
            for read in (self.read_errors, self.read_answers)
        ]
        source = AGENT.read_bytes()
        self.write(f"{len(source)}\n".encode() + source)
        for reader in self.readers:
            reader.start()

    def write(self, data: bytes) -> None:
        """Write to the host. An error means that the connection has ended, which is reported."""
        assert self.process.stdin
        with self.lock, suppress(OSError, ValueError):
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def ask(self, request: str, **facts: Any) -> None:
        """Send a request of host_agent.py."""
        self.write(json.dumps({"do": request, **facts}).encode() + b"\n")

    def read_answers(self) -> None:
        """Pass on what the host says, until the connection ends."""
        assert self.process.stdout
        for raw in self.process.stdout:
            line = raw.decode(errors="replace").rstrip("\r\n")
            if line.startswith(host_agent.MARK):
                facts = json.loads(line.removeprefix(host_agent.MARK))
                self.answers.put(Answer(self.host, facts.pop("say"), facts, time.time()))
            elif self.is_started:  # before that it is what a login shell prints
                self.answers.put(Answer(self.host, "line", {"stream": 1, "text": line}))
        code = self.process.wait()
        self.readers[0].join(LEAVE)
        self.answers.put(Answer(self.host, "lost", {"code": code, "text": self.last_errors()}))

    def read_errors(self) -> None:
        """Keep the last lines that ssh, or the remote shell, writes to stderr."""
        assert self.process.stderr
        for raw in self.process.stderr:
            self.errors = [*self.errors, raw.decode(errors="replace").strip()][-KEPT:]

    def last_errors(self) -> str:
        """Return the last lines of stderr as one; "" if there are none."""
        return "; ".join(filter(None, self.errors))

    def close(self) -> None:
        """Close the input, which ends what runs on the host. It does not wait."""
        assert self.process.stdin
        with self.lock, suppress(OSError):
            self.process.stdin.close()

    def end(self) -> None:
        """Wait for the end of ssh after `close`, and kill it if it does not end."""
        try:
            self.process.wait(LEAVE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def heartbeat(connections: Collection[Connection]) -> Generator[None]:
    """Let the hosts know that this command is alive while the body runs."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(BEAT):
            for connection in connections:
                connection.ask("alive")

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def address_of(ssh: Sequence[str], host: str) -> str:
    """Return the address that ssh's config gives a host, by default the name without the user.

    Args:
        ssh: The command of --ssh, split.
        host: As for ssh.
    """
    name = host.rpartition("@")[2]
    try:
        done = subprocess.run(
            [*ssh, "-G", "--", host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RESOLVE,
        )
    except (OSError, subprocess.TimeoutExpired):
        return name
    lines = [line.split() for line in done.stdout.splitlines()]
    return next((line[1] for line in lines if line[:1] == ["hostname"] and len(line) == 2), name)
