"""`ddp-lab train --hosts`: checks, output, errors and signals, with a stand-in for ssh.

The agents are real ones, on this machine. What they start is a stand-in, too.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import psutil
import pytest
from launches import SMALL, SUPPORT, wait_for

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers import host_agent, host_group, host_run, hosts, ssh, waiting
from ddp_lab.launchers.hosts import launch_on_hosts

STUB = SUPPORT / "stub_package"
A = "127.0.0.2"
B = "127.0.0.3"
BOTH = f"{A},{B}"
LINE = [*SMALL, "strategy=ddp"]


class FakeHosts:
    """Hosts that are this machine.

    Args:
        folder: Gets what is executed on a host before the command.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.option = f"{SUPPORT / 'fake_ssh.sh'} {folder}"

    def before(self, host: str, text: str) -> None:
        """Let a host execute lines of a shell before the command."""
        (self.folder / host).write_text(f"{text}\n")

    def launch(self, *arguments: str, names: str = BOTH, **options: str) -> int:
        values = {"ssh": self.option, "directory": str(self.folder)} | options
        words = [word for name, value in values.items() for word in (f"--{name}", value)]
        return launch_on_hosts(["--hosts", names, *words, *arguments], False)


@pytest.fixture
def fake(tmp_path):
    return FakeHosts(tmp_path)


@pytest.fixture
def stub(fake, monkeypatch):
    """Hosts whose launcher is the stand-in."""
    monkeypatch.setattr(hosts, "environment_faults", lambda *arguments: [])
    before = signal.getsignal(signal.SIGINT)
    yield lambda name, *more, **options: fake.launch(
        *LINE, f"name={name}", "--nproc=1", *more, directory=str(STUB), **options
    )
    assert signal.getsignal(signal.SIGINT) is before


def refusal(fake: FakeHosts, *arguments: str, **options: str) -> str:
    """Return the message with which a launch is refused."""
    with pytest.raises(ConfigError) as error:
        fake.launch(*LINE, "--nproc=1", *arguments, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--hosts", "argument --hosts: expected one argument; see ddp-lab train --help"),
        ("--ssh x", "add --hosts a,b or --hostfile FILE"),
        ("--hosts a --hostfile f", "--hosts a: cannot be combined with --hostfile f; use one"),
        ("--hosts a,b --nnodes 2", "--nnodes: cannot be combined with --hosts and --hostfile"),
        ("--hosts a,b --master_port=1", "--master-port: cannot be combined with --hosts and"),
        ("--hosts a,b -m seed=1,2", "-m: a sweep cannot be combined with --hosts and --hostfile"),
        ("--hosts a,b --nproc gpu", "--nproc gpu: must be an integer of at least 1: the ranks of"),
        ("--hosts a,b --nproc 0", "--nproc 0: must be an integer of at least 1"),
        ("--hosts a,b --max-restarts x", "--max-restarts/--max_restarts: invalid int value: 'x'"),
        ("--hosts a,b --ssh= --nproc 1", "--ssh '': must be a command, for example 'ssh -F FILE'"),
        ("--hosts a,b --nproc 1", "strategy=single: runs in one process, and not on 2 ranks"),
        ("--hosts a,b --nproc 3 strategy=ddp batch_size=64", "divisible by the 6 replicas"),
        ("--hosts a,b epochs=0", "epochs=0: must be an integer of at least 1"),
    ],
)
def test_wrong_command_line_is_refused_before_a_host_is_asked(line, message, monkeypatch):
    monkeypatch.setattr(ssh.subprocess, "Popen", None)
    with pytest.raises(ConfigError, match=re.escape(message)):
        launch_on_hosts(line.split(), False)


def test_rank_of_torchrun_starts_no_hosts(fake, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert refusal(fake).startswith("--hosts and --hostfile: are not supported under torchrun")


def test_ssh_that_is_no_command_line_or_no_program_is_refused(fake):
    assert refusal(fake, ssh="'x") == "--ssh 'x: No closing quotation; quote it as in a shell"
    expected = "--ssh /no/ssh: cannot be started (No such file or directory). Install an ssh client"
    assert refusal(fake, ssh="/no/ssh").startswith(expected)


def test_all_hosts_that_cannot_be_reached_are_named_with_the_reason(fake):
    fake.before(A, "echo 'ssh: connect to host: Connection refused' >&2; exit 255")
    fake.before(B, "echo 'Permission denied (publickey).' >&2; exit 255")
    first, second = refusal(fake).split("\nerror: ")
    assert first == (
        f"{A}: cannot be reached by ssh (ssh: connect to host: Connection refused). Must be a host "
        "that ssh enters without a password and whose key it knows; "
        f"`{fake.option} -o BatchMode=yes {A} true` must print nothing"
    )
    assert second.startswith(f"{B}: cannot be reached by ssh (Permission denied (publickey).).")


def test_host_that_does_not_answer_is_waited_for_in_words_and_then_named(fake, monkeypatch, capsys):
    monkeypatch.setattr(host_group, "HELLO", 3.0)
    monkeypatch.setattr(host_group, "FIRST", 1.0)
    fake.before(B, "exec sleep 60")
    text = refusal(fake)
    assert text.startswith(f"{B}: has not answered within 3 s. Must be a host that ssh enters")
    assert f"`{fake.option} -o BatchMode=yes {B} {sys.executable} --version`" in text
    assert capsys.readouterr().err == f"waiting for {B} to answer\n"
    assert waiting.FIRST == 5.0


def test_interpreter_that_a_host_lacks_is_named(fake):
    text = refusal(fake, python="/no/py thon")
    assert text.startswith(f"{A}: --python /no/py thon: cannot be started there (")
    assert "/no/py thon: not found)" in text, "it is one word of the shell"
    assert "Install ddp_lab on every host at the same path, or use --python PATH" in text
    assert text.count("error: ") == 1


def test_interpreter_that_ends_at_once_is_named_with_its_error(fake):
    fake.before(B, "echo 'libpython: cannot open' >&2; exit 1")
    expected = f"{B}: {sys.executable} ended before it could check the host (libpython: cannot open"
    assert refusal(fake).startswith(expected)


def test_missing_directory_is_named_and_what_a_shell_would_execute_is_not(fake):
    evil = f"{fake.folder}/$(touch {fake.folder}/executed); 'touch {fake.folder}/executed'"
    text = refusal(fake, directory=evil)
    expected = f"{A}: --directory {evil}: cannot be entered there (No such file or directory). Must"
    assert text.startswith(expected)
    assert f"\nerror: {B}: --directory" in text
    assert not (fake.folder / "executed").exists()


def fake_package(folder: Path, name: str, version: str) -> Path:
    """Write the metadata of an installed package, and return the folder for the search path."""
    info = folder / f"of-{name}" / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return info.parent


def test_other_version_of_torch_is_named_with_the_remedy(fake):
    fake.before(B, f"export PYTHONPATH={fake_package(fake.folder, 'torch', '1.2.3')}")
    version = host_agent.version_of("torch")
    assert refusal(fake) == (
        f"{B}: has torch 1.2.3, but {A} {version}. Must be the same on all hosts: "
        f"`{sys.executable} -m pip install torch=={version}` on {B}"
    )


def test_other_ddp_lab_is_named_by_its_version_or_its_first_file(fake, monkeypatch):
    package = fake_package(fake.folder, "ddp_lab", "0.0.1") / "ddp_lab"
    package.mkdir()
    (package / "__init__.py").touch()
    # in the directory of the launch, which comes first on the search path
    text = refusal(fake, directory=str(package.parent))
    assert text.startswith(f"{A}: has ddp_lab 0.0.1, but this machine ")
    assert f". Must be the same everywhere: copy this machine's to {package}, or install" in text

    monkeypatch.setattr(hosts, "version_of", lambda package: "0.0.1")
    text = refusal(fake, directory=str(package.parent))
    files = host_agent.fingerprint(str(Path(hosts.__file__).parents[1]))
    differs = f"{A}: has another ddp_lab than this machine, in {len(files)} files, the first of"
    assert f"{differs} which is {min(files)}" in text


def test_python_without_torch_is_named(fake):
    fake.before(B, f"export PATH={fake.folder}:$PATH")
    bare = fake.folder / "bare"
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S "$@"\n')
    bare.chmod(0o755)
    text = refusal(fake, python=str(bare))
    expected = f"{A}: torch is not installed for {bare} in {fake.folder}. Install it there, or"
    assert text.startswith(expected)


def test_clock_that_is_apart_is_named_with_the_seconds(fake):
    (fake.folder / "sitecustomize.py").write_text(
        "import time\nnow = time.time\ntime.time = lambda: now() - 61\n"
    )
    fake.before(B, f"export PYTHONPATH={fake.folder}")
    assert re.fullmatch(
        rf"{B}: its clock is 6[01]\.\d s behind that of {A}\. At most 1 s is allowed, because the "
        "first of several errors is found by its time; synchronise both, for example by "
        "`timedatectl set-ntp true`",
        refusal(fake),
    )


def test_taken_port_is_named_with_the_host(fake):
    with socket.create_server((A, 0)) as server:
        port = server.getsockname()[1]
        text = refusal(fake, "--rdzv-endpoint", f"{A}:{port}")
    assert text == (
        f"{A}: port {port}, at which the hosts are to meet, cannot be opened (Address already in "
        f"use). Must be a free port; choose another one by --rdzv-endpoint {A}:PORT, or leave the "
        "option out, for a port that is free"
    )


def test_place_to_meet_that_is_no_host_is_refused(fake):
    assert refusal(fake, "--rdzv-endpoint", "c:29400") == (
        "--rdzv-endpoint c:29400: must be a port of one of the hosts; use one of "
        f"{A}:PORT, {B}:PORT"
    )


def test_host_that_cannot_reach_the_others_is_named(fake):
    text = refusal(fake, names="no-such-host.invalid,z-other.invalid")
    pattern = (
        r"z-other\.invalid: cannot connect to no-such-host\.invalid:\d+, where the ranks are to "
        r"meet \(.+\)\. Must be an address that every host reaches, through its firewall, too"
    )
    assert re.match(pattern, text), text


def test_default_number_of_ranks_is_that_of_the_gpus_of_each_host(fake, tmp_path):
    for host, gpus in ((A, 3), (B, 2)):
        folder = tmp_path / f"gpus-{gpus}"
        folder.mkdir()
        (folder / "torch.py").write_text(
            f"class cuda:\n    device_count = staticmethod(lambda: {gpus})\n"
        )
        fake.before(host, f"export PYTHONPATH={folder}")
    with pytest.raises(ConfigError, match="divisible by the 5 replicas that share it"):
        fake.launch(*LINE)


@pytest.mark.slow
def test_gpus_that_cannot_be_counted_are_named(fake, tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart is missing')\n")
    fake.before(B, f"export PYTHONPATH={tmp_path}")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigError) as error:
        fake.launch(*LINE, directory=str(tmp_path / "elsewhere"))
    expected = f"{B}: its GPUs cannot be counted (OSError: libcudart is missing). `"
    assert str(error.value).startswith(expected)


@pytest.mark.covers("train --directory")
def test_output_of_each_host_has_its_name_and_arguments_arrive_unchanged(stub, capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "$(x) 'y'")
    evil = "tracker_options.wandb.project='$(touch x); `y` \"z\"'"
    assert stub("prints", evil, "--max-restarts=2", "--rdzv-conf", "join_timeout=60") == 0
    out, err = capsys.readouterr()
    lines = dict(line.split(": ", 1) for line in out.splitlines() if "without" not in line)
    first, second = (json.loads(lines[host]) for host in (A, B))
    for host, arguments in ((A, first), (B, second)):
        assert [*LINE, "name=prints", evil, "--max-restarts=2"] == arguments[-len(LINE) - 3 :]
        assert arguments[:2] == ["train", "--log-dir"], "torch's own folder would be left"
        assert arguments[3:7] == ["--nproc", "1", "--nnodes", "2"]
        assert arguments[arguments.index("--local-addr") + 1] == host
        assert f"--rdzv-conf=join_timeout=60,is_host={int(host == A)}" in arguments
        assert f"{host}: without a newline\n" in out
        assert f"{host}: $(x) 'y' {STUB}\n" in err
    same = "--rdzv-id"
    assert first[first.index(same) + 1] == second[second.index(same) + 1]
    endpoint = first[first.index("--rdzv-endpoint") + 1]
    assert f"2 ranks: 1 on {A}, 1 on {B}; they meet at {endpoint}\n" in err


@pytest.mark.covers("train --hostfile")
def test_slots_of_a_hostfile_are_the_numbers_of_ranks(fake, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hosts, "environment_faults", lambda *arguments: [])
    file = tmp_path / "rack"
    file.write_text(f"{B} slots=2\n{A} slots=1 # small\n")
    line = ["--hostfile", str(file), "--ssh", fake.option, "--directory", str(STUB)]
    assert launch_on_hosts([*line, *LINE, "name=prints"], False) == 0
    assert f"3 ranks: 2 on {B}, 1 on {A}; they meet at {A}:" in capsys.readouterr().err
    assert launch_on_hosts([*line, *LINE, "name=prints", "--nproc", "4"], False) == 0
    assert f"8 ranks: 4 on {B}, 4 on {A}; they meet" in capsys.readouterr().err


def test_one_host_needs_no_place_to_meet(stub, capsys):
    assert stub("prints", names=A) == 0
    out, err = capsys.readouterr()
    arguments = json.loads(out.splitlines()[0].partition(": ")[2])
    assert arguments[3:6] == ["--nproc", "1", LINE[0]]
    assert "meet" not in err


def test_only_the_first_cause_is_shown_with_its_host(stub, capsys):
    assert stub("fails") == 1
    out, err = capsys.readouterr()
    assert err.endswith(f"{B}: Traceback\n{B}: ValueError: mine\n")
    assert "ConnectionError" not in out + err


def test_first_cause_is_found_although_the_clocks_differ(stub, capsys, monkeypatch):
    """By the clocks of the hosts 127.0.0.3 failed a second earlier."""
    monkeypatch.setattr(hosts, "clock_faults", lambda clocks: [])
    compare = host_group.HostGroup.compare_clocks

    def with_a_slow_one(group):
        clocks = compare(group)
        return clocks | {B: clocks[B]._replace(ahead=clocks[A].ahead - 3.0)}

    assert stub("late") == 1
    assert capsys.readouterr().err.endswith(f"ValueError: of {B}\n")
    monkeypatch.setattr(host_group.HostGroup, "compare_clocks", with_a_slow_one)
    assert stub("late") == 1
    assert capsys.readouterr().err.endswith(f"ValueError: of {A}\n")


def test_refusal_of_all_hosts_is_shown_once_without_a_host(stub, capsys):
    assert stub("refuses") == 2
    assert capsys.readouterr().err.endswith("\nerror: epochs=0: must be at least 1\n")


def test_launch_ends_on_all_hosts_after_one_has_failed_without_a_report(stub, capsys, monkeypatch):
    monkeypatch.setattr("ddp_lab.launchers.host_run.AFTER_OTHER", 0.5)
    monkeypatch.setattr("ddp_lab.launchers.host_run.GRACE", 0.5)
    assert stub("one-fails") == 1
    out, err = capsys.readouterr()
    assert f"{B}: ended with exit code 9\n" in err
    assert_gone(out)


def test_host_that_does_not_report_its_end_is_named(monkeypatch, capsys):
    for name in ("AFTER_OTHER", "GRACE", "KILLED"):
        monkeypatch.setattr(host_run, name, 0.1)
    asked: list[str] = []
    connection = SimpleNamespace(ask=lambda request, **facts: asked.append(request))
    answers: SimpleQueue[ssh.Answer] = SimpleQueue()
    answers.put(ssh.Answer("b", "ended", {"code": 1, "error": None}))
    connections = {"a": connection, "b": connection}
    assert host_run.HostRun(connections, answers, {"a": 0.0, "b": 0.0}, "a").wait() == 1
    assert asked == ["end"]
    assert "error: a: has not reported the end of its ranks. They end there at the latest 15 s" in (
        capsys.readouterr().err
    )


def pids_of(out: str) -> list[int]:
    """Return the process ids that the stand-ins have printed."""
    return [int(number) for number in re.findall(r"^[\d.]+: (\d+)$", out, re.MULTILINE)]


def assert_gone(out: str) -> None:
    """Assert that the processes whose ids were printed are none any more."""
    pids = pids_of(out)
    assert pids
    wait_for("end of all processes", lambda: not any(map(psutil.pid_exists, pids)), 10)


def signal_when(capture, printed: int, numbers: list[int], out: list[str]) -> threading.Thread:
    """Send signals to this process, one per second, as soon as `ready` was printed so often."""

    def watch() -> None:
        deadline = time.monotonic() + 60
        while "".join(out).count("ready") < printed and time.monotonic() < deadline:
            out.append(capture.readouterr().out)
            time.sleep(0.1)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(1)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 75, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.slow),
    ],
)
def test_signal_reaches_the_launchers_of_all_hosts_which_may_save(number, code, stub, capfd):
    out: list[str] = []
    thread = signal_when(capfd, 2, [number], out)
    assert stub("waits") == code
    thread.join()
    printed = "".join(out) + capfd.readouterr().out
    for host in (A, B):
        assert f"{host}: saved after {number.name}\n" in printed


def test_second_ctrl_c_kills_what_does_not_end(stub, capfd):
    out: list[str] = []
    thread = signal_when(capfd, 2, [signal.SIGINT, signal.SIGINT], out)
    assert stub("hangs") == 130
    thread.join()
    assert_gone("".join(out) + capfd.readouterr().out)


@pytest.mark.slow
def test_lost_connection_ends_the_launch_on_all_hosts(fake, capfd):
    """The stand-in for ssh is killed, as a connection that breaks."""
    out: list[str] = []
    arguments = ["--hosts", BOTH, "--ssh", fake.option, "--directory", str(STUB)]
    code = (
        "import sys; from ddp_lab.launchers import hosts; "
        "hosts.environment_faults = lambda *each: []; "
        "sys.exit(hosts.launch_on_hosts(sys.argv[1:], False))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, *LINE, "name=hangs", "--nproc=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while "".join(out).count("ready") < 2 or len(pids_of("".join(out))) < 2:
        out.append(process.stdout.readline())
        assert out[-1], process.stderr.read()
    # what stands in for ssh has become the agent
    agents = psutil.Process(process.pid).children()
    agents[1].kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    pattern = r"^error: 127\.0\.0\.[23]: the connection was lost\. Its ranks end with it, and so do"
    assert len(re.findall(pattern, err, re.MULTILINE)) == 1, err
    assert len(re.findall("^error", err, re.MULTILINE)) == 1, err
