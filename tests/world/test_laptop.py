"""Systems without /proc (macOS), and a Mac's GPU.

No Mac was available: /proc is hidden on Linux, and mps is simulated.
"""

import contextlib
import os
import subprocess
import sys
from functools import cache

import psutil
import pytest
import torch
from configs import config
from launches import read_metrics
from namespaces import launch_where_mounted

from ddp_lab.config.build import call_target
from ddp_lab.config.errors import ConfigError
from ddp_lab.run.speed import unsupported_options
from ddp_lab.strategies.single import Single
from ddp_lab.tasks.base import sum_dtype
from ddp_lab.training.performance import choose
from ddp_lab.training.profiler import check_profile
from ddp_lab.world.device import find_device, list_devices
from ddp_lab.world.process import is_alive, start_time
from ddp_lab.world.runtime import Runtime


@contextlib.contextmanager
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "error", [None, psutil.AccessDenied(1), psutil.NoSuchProcess(1), OSError()]
)
def test_process_is_alive_until_it_is_a_zombie_or_has_exited(error, monkeypatch):
    """If its state cannot be read, it counts as alive until signal 0 does not reach it."""
    if error:
        monkeypatch.setattr(psutil, "Process", lambda pid: (_ for _ in ()).throw(error))
    with child() as running:
        assert is_alive(running.pid)
        running.kill()
        # it is a zombie until it is reaped
        os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
        assert is_alive(running.pid) == bool(error)
    assert not is_alive(running.pid)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_start_time_distinguishes_processes(platform, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    with child() as other:
        assert start_time(os.getpid()) == start_time(os.getpid())
        assert "" not in (start_time(os.getpid()), start_time(other.pid))
        assert start_time(os.getpid()) != start_time(other.pid)
    assert start_time(other.pid) == ""


@pytest.mark.slow
def test_two_ranks_train_where_proc_is_hidden(tmp_path):
    overrides = [
        "strategy=ddp",
        "device=cpu",
        "epochs=2",
        f"runs_dir={tmp_path}",
        "name=run",
        "inject='slow@rank=1,step=3'",
    ]
    ended = launch_where_mounted("-t tmpfs none /proc", *overrides, cold=True)
    # during the slow step of 3 s, rank 0 checks the other rank six times
    assert ended.returncode == 0, ended.stderr
    assert [record["epoch"] for record in read_metrics(tmp_path / "run")] == [1, 2]
    assert not (tmp_path / "run" / "failure.json").exists()


@pytest.fixture
def mac(monkeypatch):
    """Make torch report a Mac with a GPU; nothing can be computed on it."""
    # torch._dynamo unwraps it
    monkeypatch.setattr(torch.backends.mps, "is_available", cache(lambda: True))


def test_device_mps_is_found_on_a_mac_and_only_if_asked_for(mac, monkeypatch):
    assert find_device("mps") == torch.device("mps", 0)
    assert "mps" in list_devices()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Runtime("auto").device == torch.device("cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"device=mps: is not supported by 2 ranks: .* or set device=cpu"
    ):
        Runtime("mps")


@pytest.mark.parametrize("name", ["ddp", "mesh"])
def test_device_mps_is_rejected_by_strategies_other_than_single(name, mac):
    cfg = config(f"strategy={name}", "device=mps")
    with pytest.raises(
        ConfigError,
        match=f"device=mps: is not supported by strategy={name}: .* Use strategy=single",
    ):
        call_target(cfg.strategy, Runtime("mps"))


def test_single_on_mps_disables_unsupported_options(mac):
    strategy = Single(Runtime("mps"))
    assert sum_dtype(strategy.device) == torch.float32
    assert strategy.where == "1 x mps"
    required = dict.fromkeys(["cuda_graph", "channels_last", "compile"], True)
    options = choose(False, required, unsupported_options(strategy, torch.nn.Linear(1, 1)))
    assert (options.cuda_graph, options.channels_last, options.compile) == (False, False, False)
    assert [line.split(" ")[0] for line in options.disabled] == [
        f"{name}=true" for name in required
    ]
    with pytest.raises(ConfigError, match="profile=true: is not supported on device=mps"):
        check_profile(1000, strategy.device)
