"""`ddp-lab train --hosts` over real sshd on two loopback addresses (ssh_hosts.py)."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launches import SMALL, SUPPORT, finish, launch, only_run, read_metrics, start, wait_for
from ssh_hosts import ADDRESSES, SshHosts
from test_host_agent import BUSY, LIMIT, is_running, wait_for_end
from warm_python import write_warm_python

A, B = ADDRESSES
LINE = [*SMALL, "strategy=scratch", "device=cpu"]
NEVER_ENDING = ["epochs=100000", "checkpoint.every_steps=1000"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if missing := SshHosts.missing():
        pytest.skip(f"OpenSSH is not installed (openssh-server): no {', '.join(missing)}")
    with SshHosts(tmp_path_factory.mktemp("ssh")) as hosts:
        write_warm_python(hosts.folder / "python")
        yield hosts


def start_on(hosts: SshHosts, *more: str, warm: bool = True, names: str = f"{A},{B}"):
    """Start a launch on the hosts, by ranks that are forked from a server or not."""
    python = str(hosts.folder / "python") if warm else sys.executable
    options = ["--hosts", names, "--ssh", hosts.option, "--python", python, "--nproc", "1"]
    return start("ddp-lab train", *options, *LINE, *more, stderr=subprocess.PIPE)


def launch_on(hosts: SshHosts, *more: str, **options) -> tuple[int, str, str]:
    """Launch on the hosts; return the exit code, and what was printed to stdout and stderr."""
    process = start_on(hosts, *more, **options)
    try:
        out, err = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"not done:\n{process.communicate()}") from None
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.covers("train --hosts", "train --ssh", "train --python")
def test_two_hosts_have_the_losses_of_one_with_as_many_ranks(hosts, tmp_path):
    file = tmp_path / "outcome.json"
    more = ["epochs=2", "strategy=scratch"]
    code, out, err = launch_on(hosts, *more, f"runs_dir={tmp_path}/two", "--json", str(file))
    assert code == 0, out + err
    two = only_run(tmp_path / "two")
    code, output = launch("ddp-lab train --nproc 2", *LINE, *more, f"runs_dir={tmp_path}/one")
    assert code == 0, output
    losses = [
        [row["train_loss"] for row in read_metrics(run)]
        for run in (two, only_run(tmp_path / "one"))
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2

    assert f"{A}: epoch 2: " in out
    assert f"{B}: rank 1 trains here; the output is that of rank 0 on {A}" in out
    assert re.search(rf"^2 ranks: 1 on {A}, 1 on {B}; they meet at {A}:\d+$", err, re.MULTILINE)
    record = json.loads(file.read_text())
    assert (record["status"], record["exit_code"]) == ("finished", 0)
    assert record["run_dir"] == str(two)
    assert record["result"]["epoch"] == 2


@pytest.mark.slow
def test_doctor_measures_the_links_between_the_hosts(hosts, tmp_path):
    """With the strategy of the defaults, `single`, which does not train on two ranks."""
    options = ["--hosts", f"{A},{B}", "--ssh", hosts.option, "--nproc", "1"]
    options += ["--python", str(hosts.folder / "python")]
    process = start("ddp-lab doctor --fabric", *options, "device=cpu", f"runs_dir={tmp_path}")
    code, output = finish(process, 200)
    assert code == 0, output
    assert re.search(rf"^{A}: ok       pair 0-1: [\d.]+ GB/s, network$", output, re.MULTILINE)
    for host in ADDRESSES:
        assert f"{host}: ok       shared memory: " in output


def test_host_without_a_server_is_named_with_the_words_of_ssh(hosts):
    code, out, err = launch_on(hosts, names=f"{A},127.0.0.4")
    assert (code, out) == (2, "")
    pattern = (
        r"error: 127\.0\.0\.4: cannot be reached by ssh \(ssh: connect to host 127\.0\.0\.4 port "
        r"\d+: Connection refused\)\. Must be a host that ssh enters without a password and whose "
        r"key it knows; `ssh -F \S+ -o BatchMode=yes 127\.0\.0\.4 true` must print nothing\n"
    )
    assert re.fullmatch(pattern, err), err


def test_host_whose_key_is_unknown_is_named_with_the_words_of_ssh(hosts):
    (hosts.folder / "none").touch()
    process = start(
        "ddp-lab train --nproc 1 --hosts",
        f"{A},{B}",
        "--ssh",
        f"{hosts.option} -o UserKnownHostsFile={hosts.folder}/none",
        *LINE,
    )
    code, output = finish(process, 100)
    assert code == 2, output
    assert f"error: {A}: cannot be reached by ssh (" in output
    assert "Host key verification failed." in output


def test_missing_directory_and_taken_port_are_named_over_ssh(hosts):
    code, _, err = launch_on(hosts, "--directory", "/no/such dir")
    assert code == 2
    for host in ADDRESSES:
        assert f"error: {host}: --directory /no/such dir: cannot be entered there (No such" in err
    with socket.create_server((A, 0)) as server:
        port = server.getsockname()[1]
        code, _, err = launch_on(hosts, f"--rdzv-endpoint={A}:{port}")
    assert code == 2
    text = f"error: {A}: port {port}, at which the hosts are to meet, cannot be"
    # on a busy machine after a line that says that it waits
    assert any(line.startswith(text) for line in err.splitlines()), err


def test_exception_of_a_rank_is_shown_once_with_its_host(hosts, tmp_path):
    """Rank 1 fails while rank 0 waits for it."""
    code, out, err = launch_on(
        hosts, "epochs=2", f"runs_dir={tmp_path}", "inject=raise@rank=1,step=3"
    )
    assert code == 1, out + err
    text = "RuntimeError: injected by inject=raise@rank=1,step=3"
    assert (out + err).count(text) == 1, out + err
    assert f"\n{B}: {text}\n" in err
    assert f"{B}: error: rank 1 on " in err
    # the error of rank 0, to which the connection was closed, follows from it
    assert not [line for line in err.splitlines() if line.startswith(f"{A}: ")], err
    assert not hosts.processes(A) + hosts.processes(B)


@pytest.fixture(scope="module")
def start_limit() -> float:
    """Return the seconds in which ranks must start: 15, or more on a busy machine."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=200)
    # on two quiet cores 2 s; this command, the launchers and the ranks import it after each other
    return max(15.0, 8 * (time.monotonic() - begin))


def wait_for_ranks(process: subprocess.Popen, hosts: SshHosts, limit: float) -> None:
    """Wait until each host has an agent, a launcher and a rank; fail after `limit` seconds."""

    def has_ranks(address: str) -> bool:
        return len(hosts.processes(address)) >= 3

    def started() -> bool:
        assert process.poll() is None, process.communicate()
        return all(map(has_ranks, ADDRESSES))

    begin = time.monotonic()
    wait_for("ranks", started, limit)
    print(f"ranks after {time.monotonic() - begin:.1f} s of at most {limit:.1f} s")


def wait_for_training(process: subprocess.Popen, runs: Path) -> None:
    """Wait until a launch trains; fail if it has ended instead."""

    def trains() -> bool:
        assert process.poll() is None, process.communicate()
        return any("epoch 1:" in path.read_text() for path in runs.glob("*/train.log"))

    wait_for("first epoch", trains, 200)


def everything_on(hosts: SshHosts) -> list[psutil.Process]:
    """Return the processes on both hosts: agents, launchers, ranks and what these have started."""
    processes = [each for host in ADDRESSES for each in hosts.processes(host)]
    names = [" ".join(each.cmdline()) for each in processes]
    assert len([name for name in names if "-m ddp_lab" in name]) >= 2, names
    assert len(processes) >= 6, names
    return processes


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_no_process_on_any_host(hosts, start_limit, tmp_path):
    """The terminal sends SIGINT to the whole group of the command."""
    process = start_on(hosts, *NEVER_ENDING, f"runs_dir={tmp_path}", warm=False)
    wait_for_ranks(process, hosts, start_limit)
    wait_for_training(process, tmp_path)
    processes = everything_on(hosts)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT + 6 * BUSY)
    assert process.returncode == 130, out + err
    assert "Traceback" not in out + err
    wait_for_end(processes)
    assert json.loads((only_run(tmp_path) / "status.json").read_text())["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["connection", pytest.param("command", marks=pytest.mark.extra)])
def test_lost_connection_leaves_no_process_on_any_host(lost, hosts, tmp_path):
    """The session of sshd on one host is killed, or the command itself with its connections."""
    process = start_on(hosts, *NEVER_ENDING, f"runs_dir={tmp_path}", warm=False)
    wait_for_training(process, tmp_path)
    processes = everything_on(hosts)
    if lost == "connection":
        for session in hosts.sessions(B):
            session.kill()
    else:
        process.kill()
    begin = time.monotonic()
    wait_for_end(processes, LIMIT + BUSY)
    print(f"all ended {time.monotonic() - begin:.1f} s after the end of the {lost}")
    out, err = process.communicate(timeout=60)
    if lost == "connection":
        assert process.returncode == 1, out + err
        text = f"error: {B}: the connection was lost ("
        assert err.count(text) == 1, err
        assert "the same command resumes the run" in err
        assert "Traceback" not in out + err
    assert not [each for each in processes if is_running(each)]


def test_support_reads_nothing_of_the_users_own_ssh(hosts):
    assert str(SUPPORT) not in hosts.option
    shown = subprocess.run(
        [*hosts.option.split(), "-G", A], capture_output=True, text=True, check=True
    ).stdout
    files = [line for line in shown.splitlines() if line.startswith(("identityfile", "userknown"))]
    assert files
    assert all(str(hosts.folder) in line for line in files), files
