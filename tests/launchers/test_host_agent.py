"""The agent of a host leaves no process, however its connection ends."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest
from launches import SUPPORT, wait_for

from ddp_lab.launchers import host_agent, ssh
from ddp_lab.launchers.ssh import Connection, address_of

STUB = SUPPORT / "stub_package"
LIMIT = 5.0  # seconds after which nothing may run on a host
BUSY = 5.0  # additional seconds on a busy machine


class Host:
    """An agent of this machine whose launcher is the stand-in.

    Args:
        folder: For the stand-in of ssh.
        behaviour: Of the launcher.
    """

    def __init__(self, folder, behaviour: str):
        self.answers: SimpleQueue = SimpleQueue()
        command = [str(SUPPORT / "fake_ssh.sh"), str(folder)]
        self.connection = Connection(command, "a", sys.executable, self.answers)
        self.connection.is_started = True
        self.connection.ask("check", directory=str(STUB), environment={}, count_gpus=False)
        self.connection.ask("start", arguments=["train", f"name={behaviour}"], wants_outcome=False)
        self.lines: list[str] = []

    def read_until(self, kind: str, text: str = "") -> dict:
        """Return the facts of the next answer of a kind, for lines one that a pattern matches."""
        while True:
            answer = self.answers.get(timeout=60)
            if answer.kind == "line":
                self.lines.append(answer.facts["text"])
            if answer.kind == kind and re.fullmatch(text, answer.facts.get("text", "")):
                return answer.facts

    def hang(self) -> list[psutil.Process]:
        """Return the processes of the host, none of which ends by SIGTERM, when all of them run."""
        pid = int(self.read_until("line", r"\d+")["text"])
        if "ready" not in self.lines:
            self.read_until("line", "ready")
        agent = psutil.Process(self.connection.process.pid)
        processes = [agent, *agent.children(), psutil.Process(pid)]
        assert len(processes) >= 3
        return [each for each in processes if is_running(each)]


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory, monkeypatch) -> Path:
    """The folder for temporary files, in which nothing may be left, also by a killed agent."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    wait_for("empty folder", lambda: not any(folder.iterdir()), LIMIT + BUSY)


def launcher_of(agent: psutil.Process) -> psutil.Process:
    """Return the launcher that an agent has started."""
    (launcher,) = [each for each in agent.children() if "ddp_lab" in each.cmdline()]
    return launcher


def wait_for_end(processes: list[psutil.Process], limit: float = LIMIT + BUSY) -> None:
    wait_for(
        "end of all processes",
        lambda: not [each for each in processes if is_running(each)],
        limit,
        lambda: str([each for each in processes if is_running(each)]),
    )


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_agent_answers_and_passes_on_output_and_the_end(tmp_path):
    host = Host(tmp_path, "fails")
    assert host.read_until("checked")["directory"] is None
    ended = host.read_until("ended")
    assert ended["code"] == 1
    assert ended["error"]["message"]["message"] == "Traceback\nValueError: mine"
    assert host.read_until("lost")["code"] == 0


def test_what_a_launcher_has_left_is_killed_at_its_end(tmp_path):
    host = Host(tmp_path, "leaves")
    left = psutil.Process(int(host.read_until("line", r"\d+")["text"]))
    assert is_running(left)
    assert host.read_until("ended")["code"] == 0
    wait_for_end([left])


def test_closed_connection_leaves_no_process(tmp_path):
    host = Host(tmp_path, "hangs")
    processes = host.hang()
    host.connection.close()
    wait_for_end(processes)


def test_launcher_may_save_after_its_connection_was_closed(tmp_path):
    """It gets SIGTERM, and ends before it would be killed."""
    host = Host(tmp_path, "waits")
    host.read_until("line", "ready")
    agent = psutil.Process(host.connection.process.pid)
    launcher = launcher_of(agent)
    begin = time.monotonic()
    host.connection.close()
    wait_for_end([agent, launcher])
    assert time.monotonic() - begin < host_agent.GRACE + BUSY


def test_silent_connection_counts_as_lost(tmp_path, monkeypatch):
    source = ssh.AGENT.read_text().replace("SILENCE = 15.0", "SILENCE = 2.0")
    agent = tmp_path / "agent.py"
    agent.write_text(source)
    monkeypatch.setattr(ssh, "AGENT", agent)
    host = Host(tmp_path, "hangs")
    with ssh.heartbeat([host.connection]):
        processes = host.hang()
        time.sleep(3.0)
        assert all(map(is_running, processes))
    wait_for_end(processes, 2.0 + LIMIT + BUSY)


def test_killed_agent_takes_the_launcher_with_it(tmp_path, temporary):
    host = Host(tmp_path, "waits")
    host.read_until("line", "ready")
    assert [path.name[:13] for path in temporary.iterdir()] == ["ddp-lab-host-"]
    agent = psutil.Process(host.connection.process.pid)
    launcher = launcher_of(agent)
    agent.kill()
    wait_for_end([agent, launcher])


def test_agent_that_is_asked_to_end_leaves_no_process(tmp_path):
    host = Host(tmp_path, "hangs")
    processes = host.hang()
    processes[0].send_signal(signal.SIGTERM)
    wait_for_end(processes)
    assert host.read_until("ended")["code"] == -signal.SIGKILL


def test_reader_that_stops_does_not_keep_the_agent_from_ending(tmp_path):
    """The launcher prints more than the connection takes, and then the connection is closed."""
    flood = tmp_path / "ddp_lab"
    flood.mkdir()
    (flood / "__init__.py").touch()
    (flood / "__main__.py").write_text("while True:\n    print('x' * 1000, flush=True)\n")
    process = subprocess.Popen(
        [sys.executable, "-c", ssh.BOOTSTRAP], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    source = ssh.AGENT.read_bytes()
    start = '{"do": "start", "arguments": [], "wants_outcome": false}\n'
    check = (
        f'{{"do": "check", "directory": "{tmp_path}", "environment": {{}}, "count_gpus": false}}'
    )
    process.stdin.write(f"{len(source)}\n".encode() + source + f"{check}\n{start}".encode())
    process.stdin.flush()
    agent = psutil.Process(process.pid)
    wait_for("launcher and cleaner", lambda: len(agent.children()) == 2, 30)
    processes = [agent, *agent.children()]
    time.sleep(2.0)  # in which all buffers are filled
    assert all(map(is_running, processes))
    process.stdin.close()
    wait_for_end(processes)
    process.stdout.close()
    process.wait()


def test_what_a_login_shell_prints_is_no_answer(tmp_path):
    (tmp_path / "a").write_text("echo welcome\n")
    host = Host(tmp_path, "prints")
    host.read_until("hello")
    host.read_until("ended")
    assert host.lines[-1] == "without a newline"


@pytest.mark.parametrize(("host", "address"), [("me@node1", "node1"), ("node2", "10.0.0.2")])
def test_address_is_that_of_the_config_of_ssh(host, address, tmp_path):
    config = tmp_path / "config"
    config.write_text("Host node2\n    HostName 10.0.0.2\n")
    assert address_of(["ssh", "-F", str(config)], host) == address
    assert address_of(["/no/ssh"], host) == host.rpartition("@")[2]
