"""Systems without /proc (macOS), and a Mac's GPU. No Mac was available: /proc is hidden on Linux, and mps is simulated."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache

import psutil
import pytest
import torch
from configs import config
from launches import ROOT, read_metrics

from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.observe.profiler import check_profile
from ddp_lab.speed.options import Facts, choose, refusals_of
from ddp_lab.strategies.single import Single
from ddp_lab.tasks.measure import sum_dtype
from ddp_lab.world import process
from ddp_lab.world.device import find_device, list_devices
from ddp_lab.world.process import is_alive, start_time
from ddp_lab.world.runtime import Runtime

HIDE_PROC = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]


@contextlib.contextmanager
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def end_without_reaping(process: subprocess.Popen) -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie until it is reaped


def refuse(error: Exception):
    def refused(*args, **kwargs):
        raise error

    return refused


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_is_alive_of_a_running_and_an_exited_process(platform, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    with child() as running:
        assert is_alive(running.pid)
        end_without_reaping(running)
        assert not is_alive(running.pid), "it is a zombie"
    assert not is_alive(running.pid)


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), OSError()])
def test_process_whose_state_cannot_be_read_counts_as_alive(error, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(psutil, "Process", refuse(error))
    with child() as running:
        assert is_alive(running.pid)
    assert not is_alive(running.pid), "signal 0 must detect it without psutil"


def test_process_whose_state_proc_does_not_show_counts_as_alive(monkeypatch):
    monkeypatch.setattr(process, "_stat", refuse(FileNotFoundError()))
    with child() as running:
        assert is_alive(running.pid)
    assert not is_alive(running.pid), "signal 0 must detect it without /proc"


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_start_time_distinguishes_processes(platform, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    with child() as other:
        assert start_time(os.getpid()) == start_time(os.getpid())
        assert "" not in (start_time(os.getpid()), start_time(other.pid))
        assert start_time(os.getpid()) != start_time(other.pid)
    assert start_time(other.pid) == ""


AGENT = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]]).pid, flush=True)
input()
"""
RANK = """
import sys, time
sys.platform = "darwin"
from ddp_lab.world.process import die_with_torchrun
die_with_torchrun()
print("watching", flush=True)
time.sleep(60)
"""


def test_rank_ends_with_its_agent_without_prctl():
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "test"}
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, RANK], cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    rank = int(agent.stdout.readline())
    try:
        assert agent.stdout.readline() == "watching\n"
        assert is_alive(rank)
        agent.kill()
        agent.wait()
        deadline = time.monotonic() + 20
        while is_alive(rank):
            assert time.monotonic() < deadline, "the rank outlived its agent"
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


@pytest.mark.slow
def test_two_ranks_train_where_proc_is_hidden(tmp_path):
    if not shutil.which("unshare") or subprocess.run([*HIDE_PROC, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount in a namespace of its own")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    overrides = ["strategy=ddp", "device=cpu", "epochs=2", f"runs_dir={tmp_path}", "name=run", "inject='slow@rank=1,step=3'"]
    ended = subprocess.run([*HIDE_PROC, *launch, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr  # during the slow step of 3 s, rank 0 checks the other rank six times
    assert [record["epoch"] for record in read_metrics(tmp_path / "run")] == [1, 2]
    assert not (tmp_path / "run" / "failure.json").exists()


@pytest.fixture
def mac(monkeypatch):
    """Make torch report a Mac with a GPU; nothing can be computed on it."""
    monkeypatch.setattr(torch.backends.mps, "is_available", cache(lambda: True))  # torch._dynamo unwraps it
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: major <= 13)


def test_device_mps_is_found_only_on_a_mac(mac, monkeypatch):
    assert find_device("mps") == torch.device("mps", 0)
    assert "mps" in list_devices()
    monkeypatch.setattr(torch.backends.mps, "is_available", cache(lambda: False))
    with pytest.raises(NodeError, match="device=mps: there is no such device"):
        find_device("mps")


def test_device_auto_does_not_choose_mps(mac, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Runtime("auto").device == torch.device("cpu")


def test_device_mps_is_rejected_for_several_ranks(mac, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"device=mps: is not supported by 2 ranks: .* or set device=cpu"):
        Runtime("mps")


def test_bf16_on_mps_is_rejected_before_macos_14(mac, monkeypatch):
    with pytest.raises(NodeError, match="precision=bf16: is not supported by device=mps before macOS 14"):
        Runtime("mps", "bf16")
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: major <= 14)
    assert Runtime("mps", "bf16").autocast().fast_dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["ddp", "dp", "pipeline", "mesh"])
def test_device_mps_is_rejected_by_strategies_other_than_single(name, mac):
    cfg = config(f"strategy={name}", "device=mps")
    with pytest.raises(ConfigError, match=f"device=mps: is not supported by strategy={name}: .* Use strategy=single"):
        build(cfg.strategy, Runtime("mps"))


def test_single_on_mps_disables_unsupported_options(mac):
    strategy = Single(Runtime("mps"))
    assert strategy.where == "1 x mps"
    required = dict.fromkeys(["cuda_graph", "channels_last", "compile"], True)
    options = choose("off", required, Facts("mps", refusals_of(strategy, torch.nn.Linear(1, 1))))
    assert (options.cuda_graph, options.channels_last, options.compile) == (False, False, False)
    assert [line.split(" ")[0] for line in options.disabled] == [f"{name}=true" for name in required]
    with pytest.raises(ConfigError, match="profile=true: is not supported on device=mps"):
        check_profile(1000, strategy.device)


def test_sums_on_mps_are_float32():
    assert sum_dtype(torch.device("mps")) == torch.float32
    assert sum_dtype(torch.device("cpu")) == sum_dtype(torch.device("cuda")) == torch.float64
