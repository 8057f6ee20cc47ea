"""The findings of `ddp-lab doctor`, and the preflight checks of train.py before it opens the process group."""

import contextlib
import io
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launches import ROOT, SMALL, launch, main_in_world, only_run, read_metrics, refusal_in_world
from omegaconf import OmegaConf
from worlds import run_world

from ddp_lab.commands import doctor
from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError
from ddp_lab.launch import storage
from ddp_lab.launch.storage import checkpoint_bytes
from ddp_lab.models.simple_cnn import simple_cnn
from ddp_lab.run.doctor import Findings, find_backend
from ddp_lab.world.device import list_devices
from ddp_lab.world.runtime import Runtime

CHECKS = ["devices", "backend", "host name", "ports", "runs_dir", "strategy", "dataset", "model", "free disk", "batch"]
CHECKS += ["loss", "partition", "loader"]
NOWHERE = "no-such-host.invalid"


def doctor_in_world(line: str) -> tuple[object, list[str], str]:
    """Run the doctor on this rank; return its exit code, the lines of its findings and what it wrote to stderr."""
    sys.argv = ["ddp-lab doctor", *line.split()]
    time.sleep = lambda seconds: None  # the ranks that do not report the error sleep first
    with tempfile.TemporaryFile("w+") as failed, contextlib.redirect_stderr(failed):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                doctor.main()
                code = 0
            except SystemExit as error:
                code = error.code
        failed.seek(0)
        return code, printed.getvalue().splitlines(), failed.read()


def with_environment(changes: dict[str, str | None], function, *args):
    """Run `function(*args)` with other environment variables; None unsets a variable."""
    for key, value in changes.items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value
    return function(*args)


def on_two_nodes(function, line: str):
    """Run `function(line)` as if the first half of the ranks were on one machine, the second half on another.

    NODE in `line` is replaced by 0 or 1.
    """
    rank, half = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // 2
    node = str(rank // half)
    os.environ |= {"LOCAL_RANK": str(rank % half), "LOCAL_WORLD_SIZE": str(half), "GROUP_RANK": node}
    storage.TOKEN_WAIT = 0.5  # seconds; enough, because the tests use no network file system
    return function(line.replace("NODE", node))


def with_free_bytes(free: int, function, line: str):
    shutil.disk_usage = lambda path: SimpleNamespace(free=free, total=2**40)
    return function(line)


def with_host_name(name: str, function, *args):
    socket.gethostname = lambda: name
    return function(*args)


def finding(lines: list[str], about: str) -> str:
    (line,) = (line for line in lines if line[9:].startswith(f"{about}: "))
    return line


def test_doctor_reports_ok_for_every_check(tmp_path):
    code, output = launch("python -m ddp_lab doctor", f"runs_dir={tmp_path}/runs", cold=True)
    assert code == 0, output
    assert [line.split(": ")[0].split(maxsplit=1)[1] for line in output.splitlines()] == CHECKS
    lines = output.splitlines()
    assert all(line.startswith("ok  ") for line in lines if ": 29500" not in line), output
    assert finding(lines, "devices").endswith(f"{socket.gethostname()}: cpu (no GPU is visible)")
    assert "1,437 images to train on, 360 to test on, 1x28x28, 10 classes" in finding(lines, "dataset")
    assert not list((tmp_path / "runs").iterdir()), "the doctor left a file"


def test_doctor_under_torchrun_prints_each_finding_once(tmp_path):
    line = "torchrun --standalone --nproc_per_node=2 -m ddp_lab doctor strategy=ddp batch_size=7"
    code, output = launch(line, f"runs_dir={tmp_path}")
    assert code == 1, output  # torchrun's exit code
    for about in CHECKS[:-3]:  # the last three need a batch
        assert output.count(f" {about}: ") == 1, output
    assert "ok       strategy: ddp on 2 ranks: dp 2\n" in output
    assert (
        "error    batch: batch_size=7: is the global batch and must be divisible by the 2 replicas that share it; use 6 or 8"
        in output
    )
    assert output.count("error: 1 of 10 findings would stop this launch") == 1, output


WRONG = {  # overrides on two ranks: the check that fails, an excerpt of its message
    "runs_dir=/proc/nowhere": ("runs_dir", "runs_dir=/proc/nowhere: cannot create the run directory there ("),
    "data=mnist data.root=train.py/none": ("dataset", "MNIST is not on HOST and could not be downloaded"),
    "batch_size=7": ("batch", "must be divisible by the 2 replicas that share it; use 6 or 8"),
    "device=cuda:7": ("devices", "device=cuda:7: there is no such device on HOST. Available: cpu"),
    "strategy=ddp_pipeline strategy.pp=3": ("strategy", "strategy.pp=3: cannot lay 2 ranks on a mesh of dp x pp"),
    "mixup=0.2 batch_size=6": ("loss", "has local batches of 3; use a global batch of 4 or 8, or mixup=0 cutmix=0"),
    "strategy=fsdp optimizer._target_=torch.optim.Adafactor ~optimizer.momentum ~optimizer.nesterov": (
        "partition",
        "optimizer._target_=torch.optim.Adafactor: cannot update DTensors, as strategy=fsdp has them",
    ),
}


@pytest.mark.parametrize("overrides", WRONG)
def test_doctor_reports_each_problem_in_one_line_with_its_remedy(overrides, tmp_path):
    strategy = "" if "strategy=" in overrides else "strategy=ddp "
    runs_dir = "" if "runs_dir=" in overrides else f"runs_dir={tmp_path} "
    first, second = run_world(2, doctor_in_world, f"{strategy}{runs_dir}{overrides}")
    code, told, failed = first
    about, message = WRONG[overrides]
    wrong = finding(told, about)
    assert wrong.startswith("error ")
    assert message.replace("HOST", socket.gethostname()) in wrong
    assert [line for line in told if line.startswith("error ")] == [wrong], "the other checks must run"
    assert code == 2
    assert failed.startswith(f"error: 1 of {len(told)} findings ")
    assert second == (0, [], ""), "every rank printed findings"


def test_doctor_reports_an_unknown_key_in_one_line():
    ((code, told, failed),) = run_world(1, doctor_in_world, "batchsize=7")
    assert (code, told) == (2, [])
    assert failed.startswith("error: batchsize=7: there is no such key; did you mean batch_size? ")
    assert failed.count("\n") == 1


def test_doctor_warns_if_a_strategy_for_several_ranks_has_one(tmp_path):
    ((code, told, _),) = run_world(1, doctor_in_world, f"strategy=ddp runs_dir={tmp_path}")
    assert code == 0
    assert finding(told, "strategy").startswith("warning  strategy: ddp has only one rank, so nothing is distributed. Use")


NETWORK = {  # environment variables of two ranks that use the store of run_world: an excerpt of the message
    "unresolvable": ({"MASTER_ADDR": NOWHERE}, f"MASTER_ADDR={NOWHERE}: does not resolve on "),
    "silent": ({"MASTER_PORT": "9"}, "MASTER_ADDR=127.0.0.1, MASTER_PORT=9: does not accept connections from "),
    "busy": ({"TORCHELASTIC_USE_AGENT_STORE": None}, "cannot be opened (Address already in use). Start torchrun with"),
}


@pytest.mark.parametrize("case", NETWORK)
def test_unreachable_store_is_reported(case, tmp_path):
    environment, message = NETWORK[case]
    ranks = 1 if case == "busy" else 2  # only rank 0 opens the port; the others would wait for it
    environment |= {"WORLD_SIZE": "2"}
    (code, told, failed), *others = run_world(
        ranks, with_environment, environment, doctor_in_world, f"strategy=ddp runs_dir={tmp_path}"
    )
    assert code == 2
    wrong = finding(told, "ports")
    assert wrong.startswith("error ")
    assert message in wrong
    assert failed.startswith("error: 1 of 4 findings ")
    assert all(other == (2, [], "") for other in others)

    (code, printed), *others = run_world(
        ranks, with_environment, environment, refusal_in_world, f"strategy=ddp runs_dir={tmp_path}/runs"
    )
    assert code == 2
    assert printed.startswith("error: MASTER_")
    assert message in printed
    assert printed.count("\n") == 1
    assert all(other == (2, "") for other in others)
    assert not (tmp_path / "runs").exists()


def test_doctor_warns_if_the_default_port_is_in_use(tmp_path):
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # another process uses it already
            stack.enter_context(socket.create_server(("", 29500)))
        without = {"MASTER_ADDR": None, "TORCHELASTIC_USE_AGENT_STORE": None}
        ((code, told, _),) = run_world(1, with_environment, without, doctor_in_world, f"runs_dir={tmp_path}")
    assert code == 0
    assert "port 29500 of " in finding(told, "ports")
    assert finding(told, "ports").startswith("warning ")
    assert "--standalone" in finding(told, "ports")


def test_unresolvable_host_name_is_a_warning_or_for_gloo_on_two_nodes_an_error(tmp_path):
    line = f"strategy=ddp runs_dir={tmp_path}"
    message = f"the host name {NOWHERE} does not resolve to an address of this machine ("
    ((code, told, _),) = run_world(1, with_host_name, NOWHERE, doctor_in_world, line)
    assert code == 0
    assert finding(told, "host name").startswith(f"warning  host name: {message}")

    first, second = run_world(2, with_host_name, NOWHERE, on_two_nodes, doctor_in_world, line)
    assert (first[0], second[0]) == (2, 0)
    assert finding(first[1], "host name").startswith(f"error    host name: {message}")

    refused = run_world(2, with_host_name, NOWHERE, on_two_nodes, refusal_in_world, line)
    for code, printed in refused:  # each node reports its own finding
        assert code == 2
        assert printed.startswith(f"error: {message}")
        assert printed.count("\n") == 1

    chosen = {"GLOO_SOCKET_IFNAME": "lo"}
    overrides = [*SMALL, "epochs=1", "name=warned", line]
    run_world(2, with_environment, chosen, with_host_name, NOWHERE, on_two_nodes, main_with_overrides, " ".join(overrides))
    for file in ("train.log", "train.rank1.log"):
        assert (tmp_path / "warned" / file).read_text().count(f"WARNING {'[rank 1] ' * ('1' in file)}{message}") == 1


def main_with_overrides(line: str) -> None:
    main_in_world(*line.split())


def test_runs_dir_that_the_nodes_do_not_share_is_an_error(tmp_path):
    line = f"strategy=ddp runs_dir={tmp_path}/NODE"
    message = f"runs_dir={tmp_path}/0: is not shared by all nodes: {socket.gethostname()} does not see the file that rank 0"
    first, *others = run_world(2, on_two_nodes, doctor_in_world, line)
    assert first[0] == 2
    assert finding(first[1], "runs_dir").startswith(f"error    runs_dir: {message}")
    assert "file system that every node has mounted" in finding(first[1], "runs_dir")
    assert others == [(0, [], "")]

    first, *others = run_world(4, on_two_nodes, refusal_in_world, line)
    assert first[0] == 2
    assert first[1].startswith(f"error: {message}")
    assert others == [(2, "")] * 3, "it must be raised on every rank and reported once"
    assert not list(tmp_path.glob("*/*")), "a rejected run left a file"

    first, *_ = run_world(2, on_two_nodes, doctor_in_world, f"strategy=ddp runs_dir={tmp_path}/all")
    assert first[0] == 0, first
    assert finding(first[1], "runs_dir") == f"ok       runs_dir: {tmp_path}/all is writable and shared"
    assert not list(tmp_path.glob("*/*")), "a token was left"


def test_free_disk_space_decides_between_ok_warning_and_error(tmp_path):
    line = f"strategy=ddp runs_dir={tmp_path}/runs"
    for free, level in ((2**19, "error"), (2 * 2**20, "warning"), (4 * 2**20, "ok")):
        first, _ = run_world(2, with_free_bytes, free, doctor_in_world, line)
        found = finding(first[1], "free disk")
        assert found.startswith(f"{level} "), found
        assert "checkpoint.keep=2 of them and the one" in found, "without a validation set there is no best one"
        assert (first[0] == 2) == (level == "error")
        assert ("Free some space, use another runs_dir, or lower checkpoint.keep" in found) == (level != "ok")

    refused, silent = run_world(2, with_free_bytes, 2**19, refusal_in_world, line)
    assert refused[0] == 2
    assert f"error: runs_dir={tmp_path}/runs: 0.5 MiB are free" in refused[1]
    assert silent == (2, "")
    assert not list((tmp_path / "runs").glob("[!.]*")), "a rejected run left a directory"


def test_nearly_full_disk_is_a_warning_in_the_log(tmp_path):
    """No warning if the run's checkpoints are already there, because the oldest one will be deleted."""
    data = "data.dataset.train_size=125 data.val_fraction=0.2"  # with a best checkpoint
    line = f"{' '.join(SMALL)} {data} strategy=ddp name=mine runs_dir={tmp_path}"
    file = tmp_path / "mine/checkpoints/step_00000005.pt"
    size = checkpoint_bytes(build(OmegaConf.load(ROOT / "conf/optimizer/sgd.yaml")), simple_cnn(3, 28, 10))
    run_world(2, with_free_bytes, 3 * size, main_with_overrides, f"{line} epochs=1")
    log = (tmp_path / "mine/train.log").read_text()
    assert log.count("WARNING") == 1
    assert f"checkpoint.keep=2 of them, the best and the one being written need {4 * size / 2**20:,.1f} MiB" in log
    assert size < file.stat().st_size < size + 2**14, "the file must contain the tensors and little else"

    run_world(2, with_free_bytes, 3 * size, main_with_overrides, f"{line} epochs=2")
    assert (tmp_path / "mine/train.log").read_text().count("WARNING") == 1, "it warned although a checkpoint was there"


WORKERS = "data=synthetic data.loader=workers model=simple_cnn batch_size=24 strategy=ddp"


def test_batch_larger_than_the_training_set_is_a_warning(tmp_path):
    """SMALL has 100 samples."""
    line = f"{' '.join(SMALL)} strategy=ddp epochs=1 name=mine runs_dir={tmp_path}"
    warning = "the global batch of 102 samples is larger than the training set: every epoch is a single step on a partial batch"
    ((code, told, _), _) = run_world(2, doctor_in_world, f"{line} batch_size=102")
    assert code == 0
    assert finding(told, "batch").startswith(f"warning  batch: {warning}")
    run_world(2, main_with_overrides, f"{line} batch_size=102")
    assert (tmp_path / "mine/train.log").read_text().count(f"WARNING {warning}") == 1
    assert not (tmp_path / "mine/train.rank1.log").exists(), "rank 1 repeated it"
    run_world(2, main_with_overrides, f"{line} batch_size=100 name=full")
    assert "WARNING" not in (tmp_path / "full/train.log").read_text()


def shared_bytes(image: int) -> int:
    """Return what two ranks of two workers need, to train and to test, in pages: batches of 12 images, and their queues."""
    pages = math.ceil(12 * image / 4096) + 1
    return 2 * 2 * ((2 * 2 + 2) * pages * 4096 + 2**17)


def test_shared_memory_too_small_for_the_workers_is_an_error(tmp_path):
    needed = shared_bytes(3 * 28 * 28)
    message = f"need {needed / 2**20:.1f} MiB of shared memory, and /dev/shm has 0.2 MiB free"
    first, second = run_world(2, with_free_bytes, 2**18, doctor_in_world, f"{WORKERS} runs_dir={tmp_path}")
    assert first[0] == 2
    assert message in finding(first[1], "loader")
    assert finding(first[1], "loader").startswith("error ")
    assert second == (0, [], "")
    found, _ = run_world(2, with_free_bytes, needed, doctor_in_world, f"{WORKERS} runs_dir={tmp_path}")
    assert finding(found[1], "loader").startswith("ok  ")

    refused, silent = run_world(2, with_free_bytes, 2**18, refusal_in_world, f"{WORKERS} runs_dir={tmp_path}/runs")
    assert refused[0] == 2
    assert refused[1].startswith("error: data.loader=workers: the batches of DataLoader workers on ")
    assert message in refused[1]
    assert (
        "Lower data.num_workers (0 needs none) or batch_size, or enlarge /dev/shm: in a container `docker run --shm-s"
        in refused[1]
    )
    assert refused[1].count("\n") == 1
    assert silent == (2, "")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_run_trains_in_the_shared_memory_that_the_check_asks_for(tmp_path):
    line = [*WORKERS.split(), "data.dataset.train_size=480", "data.dataset.image_size=128", "device=cpu", "epochs=2"]
    needed = shared_bytes(3 * 128 * 128)
    for size, code in ((needed - 2**20, 2), (needed + 2**16, 0)):  # 64 KiB for the ranks' heartbeats
        mounted = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"'
        namespace = ["unshare", "--mount", "sh", "-c", mounted, "sh"]
        if not shutil.which("unshare") or subprocess.run([*namespace, "true"], capture_output=True).returncode:
            pytest.skip("needs the right to mount in a namespace of its own")
        world = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
        ended = subprocess.run(
            [*namespace, *world, *line, f"runs_dir={tmp_path}"], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert bool(ended.returncode) == bool(code), ended.stderr
        assert ("of shared memory, and /dev/shm has" in ended.stderr) == bool(code)
    assert [record["epoch"] for record in read_metrics(only_run(tmp_path))] == [1, 2]


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize(("optimizer", "options", "copies"), [("sgd", {"momentum": 0}, 1), ("sgd", {}, 2), ("adamw", {}, 3)])
def test_checkpoint_bytes_counts_model_averages_and_optimizer_state(optimizer, options, copies, ema):
    cfg = OmegaConf.merge(OmegaConf.load(ROOT / f"conf/optimizer/{optimizer}.yaml"), options)
    assert checkpoint_bytes(build(cfg), torch.nn.Linear(10, 10), ema) == (copies + ema) * 110 * 4


def receive_error() -> str:
    def decide() -> None:
        raise ConfigError("no such thing")

    try:
        with Runtime("cpu", timeout=30) as runtime:
            runtime.store.set(f"here/{runtime.rank}", "")
            runtime.store.wait([f"here/{rank}" for rank in range(runtime.world_size)])
            time.sleep(0.3 * runtime.rank)
            runtime.agree("thing", decide)
    except ConfigError as error:
        return str(error)
    return "agreed"


def test_error_reaches_the_other_ranks_through_a_store_on_rank_0():
    """The store is on rank 0 and not in torchrun's agent with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    environment = {"TORCHELASTIC_USE_AGENT_STORE": None, "MASTER_PORT": str(port)}
    assert run_world(2, with_environment, environment, receive_error) == ["no such thing"] * 2


def test_gpus_are_listed_by_index_name_and_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(name=f"Model {i}", total_memory=80 * 2**30)
    )
    assert list_devices() == "cpu, cuda:0 (Model 0, 80 GiB), cuda:1 (Model 1, 80 GiB)"


@pytest.mark.gpu(1)
def test_doctor_lists_a_real_gpu(tmp_path):
    code, output = launch("python -m ddp_lab doctor", f"runs_dir={tmp_path}", gpus=True)
    assert code == 0, output
    assert f"cuda:0 ({torch.cuda.get_device_name(0)}, " in finding(output.splitlines(), "devices")
    assert " backend: nccl" in output


def test_doctor_reports_a_torch_without_the_backend(monkeypatch):
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    findings = Findings()
    findings.look("backend", lambda: find_backend(Runtime("cpu")))
    assert findings[0].level == "error"
    assert "is built without gloo; install one that has it" in findings[0].text
