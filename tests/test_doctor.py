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
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launches import ROOT, SMALL, launch, main_in_world, only_run, read_metrics, refusal_in_world
from omegaconf import OmegaConf
from worlds import once, run_world

from ddp_lab.commands import doctor
from ddp_lab.config.build import build
from ddp_lab.launch import storage
from ddp_lab.launch.command import command
from ddp_lab.launch.storage import checkpoint_bytes
from ddp_lab.models.simple_cnn import simple_cnn
from ddp_lab.run.doctor import Findings, find_backend
from ddp_lab.world.device import list_devices
from ddp_lab.world.runtime import Runtime

CHECKS = ["devices", "backend", "host name", "ports", "runs_dir", "strategy", "dataset", "model", "free disk", "batch"]
CHECKS += ["loss", "partition", "loader"]
NOWHERE = "no-such-host.invalid"
HERE = socket.gethostname()
WORKERS = "data=synthetic data.loader=workers model=simple_cnn batch_size=24"


def shared_bytes(image: int) -> int:
    """Return what two ranks of two workers need, to train and to test, in pages: batches of 12 images, and their queues."""
    pages = math.ceil(12 * image / 4096) + 1
    return 2 * 2 * ((2 * 2 + 2) * pages * 4096 + 2**17)


@dataclass
class Case:
    """A launch of two ranks on a machine with a problem, and what the doctor or train.py says.

    Attributes:
        line: overrides. FOLDER is replaced by a directory, NODE by the number of the node.
        about: name of the check.
        text: level and excerpt of the finding, or an excerpt of the message.
        env: environment variables; None: without it.
        free: free bytes of every disk.
        host: name of the machines.
        nodes: number of machines.
    """

    line: str
    about: str
    text: tuple[str, str]
    env: dict[str, str | None] = field(default_factory=dict)
    free: int | None = None
    host: str | None = None
    nodes: int = 1


NO_NAME = f"the host name {NOWHERE} does not resolve to an address of this machine ("
SILENT = "MASTER_ADDR=127.0.0.1, MASTER_PORT=9: does not accept connections from "
SHARE = f"FOLDER/0: is not shared by all nodes: {HERE} does not see the file that rank 0"
MEMORY = f"need {shared_bytes(3 * 28 * 28) / 2**20:.1f} MiB of shared memory, and /dev/shm has 0.2 MiB free"
DISK = "Free some space, use another runs_dir, or lower checkpoint.keep"
DOCTOR = {
    "runs_dir": Case(
        "runs_dir=/proc/nowhere", "runs_dir", ("error", "runs_dir=/proc/nowhere: cannot create the run directory")
    ),
    "dataset": Case("data=mnist data.root=train.py/none", "dataset", ("error", f"MNIST is not on {HERE} and could not be")),
    "batch": Case("batch_size=7", "batch", ("error", "must be divisible by the 2 replicas that share it; use 6 or 8")),
    "device": Case("device=cuda:7", "devices", ("error", f"there is no such device on {HERE}. Available: cpu")),
    "strategy": Case("strategy=ddp_pipeline strategy.pp=3", "strategy", ("error", "cannot lay 2 ranks on a mesh of dp x pp")),
    "mixup": Case("mixup=0.2 batch_size=6", "loss", ("error", "has local batches of 3; use a global batch of 4 or 8, or")),
    "optimizer": Case(
        "strategy=fsdp optimizer._target_=torch.optim.Adafactor ~optimizer.momentum ~optimizer.nesterov",
        "partition",
        ("error", "optimizer._target_=torch.optim.Adafactor: cannot update DTensors, as strategy=fsdp has them"),
    ),
    "large batch": Case(f"{' '.join(SMALL)} batch_size=102", "batch", ("warning", "102 samples is larger than the training")),
    "host name": Case("", "host name", ("error", NO_NAME), host=NOWHERE, nodes=2),
    "not shared": Case("runs_dir=FOLDER/NODE", "runs_dir", ("error", f"runs_dir={SHARE}"), nodes=2),
    "shared": Case("", "runs_dir", ("ok", "is writable and shared"), nodes=2),
    "full disk": Case("", "free disk", ("error", DISK), free=2**19),
    "nearly full disk": Case("", "free disk", ("warning", DISK), free=2 * 2**20),
    "disk": Case("", "free disk", ("ok", "checkpoint.keep=2 of them and the one being written"), free=4 * 2**20),
    "memory": Case(WORKERS, "loader", ("error", MEMORY), free=2**18),
    "enough memory": Case(WORKERS, "loader", ("ok", "need "), free=shared_bytes(3 * 28 * 28)),
}
REFUSED = {
    "no address": Case("", "", ("", f"MASTER_ADDR={NOWHERE}: does not resolve on "), env={"MASTER_ADDR": NOWHERE}),
    "silent store": Case("", "", ("", SILENT), env={"MASTER_PORT": "9"}),
    "host name": Case("", "", ("", NO_NAME), host=NOWHERE, nodes=2),
    "not shared": Case("runs_dir=FOLDER/NODE", "", ("", f"runs_dir={SHARE}"), nodes=2),
    "full disk": Case("", "", ("", DISK), free=2**19),
    "memory": Case(WORKERS, "", ("", "or enlarge /dev/shm: in a container `docker run --shm-size=1g`"), free=2**18),
}


def run_case(case: Case, function, folder: Path, patch: pytest.MonkeyPatch):
    """Call a function on this rank with the overrides of a case."""
    rank = int(os.environ["RANK"])
    local = 2 // case.nodes
    places = {"LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local, "GROUP_RANK": rank // local}
    for key, value in ({key: str(number) for key, number in places.items()} | case.env).items():
        patch.delenv(key, raising=False) if value is None else patch.setenv(key, value)
    if case.free is not None:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=case.free, total=2**40))
    if case.host:
        patch.setattr(socket, "gethostname", lambda: case.host)
    patch.setattr(storage, "TOKEN_WAIT", 0.5)  # seconds; enough, because the tests use no network file system
    line = case.line + ("" if "strategy=" in case.line else " strategy=ddp")
    line += "" if "runs_dir=" in case.line else " runs_dir=FOLDER/runs"
    return function(line.replace("FOLDER", str(folder)).replace("NODE", str(rank // local)))


def run_cases(cases: dict[str, Case], function, folder: Path) -> dict:
    """Run cases one after another on this rank, each in a folder of its own; return what `function` returns, by name."""
    results = {}
    for name, case in cases.items():
        with pytest.MonkeyPatch.context() as patch:
            results[name] = run_case(case, function, folder / name.replace(" ", "_"), patch)
    return results


@once
def world(function, folder: Path) -> list[dict]:
    cases = DOCTOR if function is doctor_in_world else REFUSED
    return run_world(2, run_cases, cases, function, folder, timeout=300)


def doctor_in_world(line: str) -> tuple[object, list[str], str]:
    """Run the doctor on this rank; return its exit code, the lines of its findings and what it wrote to stderr."""
    sys.argv = ["ddp-lab doctor", *line.split()]
    time.sleep = lambda seconds: None  # the ranks that do not report the error sleep first
    with tempfile.TemporaryFile("w+") as failed, contextlib.redirect_stderr(failed):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                with command():
                    doctor.main(line.split())
                code = 0
            except SystemExit as error:
                code = error.code
        failed.seek(0)
        return code, printed.getvalue().splitlines(), failed.read()


def finding(lines: list[str], about: str) -> str:
    (line,) = (line for line in lines if line[9:].startswith(f"{about}: "))
    return line


@pytest.mark.parametrize("name", DOCTOR)
def test_doctor_reports_a_problem_in_one_line_with_its_remedy(name, tmp_path):
    folder = tmp_path.parent / "doctor"
    case, (first, second) = DOCTOR[name], [rank[name] for rank in world(doctor_in_world, folder)]
    (level, text), (code, told, failed) = case.text, first
    found = finding(told, case.about)
    assert found.startswith(f"{level:8} {case.about}: ")
    assert text.replace("FOLDER", str(folder / name.replace(" ", "_"))) in found
    assert [line for line in told if line.startswith("error ")] == [found] * (level == "error"), "the other checks must run"
    assert (code == 2) == (level == "error")
    assert failed == (f"error: 1 of {len(told)} findings would stop this launch; see above\n" if level == "error" else "")
    assert second == (0, [], ""), "every rank printed findings"
    left = [path.name for path in (folder / name.replace(" ", "_")).glob("runs/*")]
    assert not left, "the doctor left a file"


@pytest.mark.parametrize("name", REFUSED)
def test_train_refuses_what_the_doctor_reports_before_it_writes_anything(name, tmp_path):
    folder = tmp_path.parent / "refused"
    first, second = (rank[name] for rank in world(refusal_in_world, folder))
    code, printed = first
    assert code == 2
    assert printed.startswith("error: ")
    assert REFUSED[name].text[1].replace("FOLDER", str(folder / name.replace(" ", "_"))) in printed
    assert printed.count("\n") == 1
    assert second == (first if name == "host name" else (2, "")), "one rank reports it; a finding of a node, one of each node"
    assert not list((folder / name.replace(" ", "_")).glob("*/[!.]*")), "a rejected run left a file"


def test_doctor_reports_ok_for_every_check(tmp_path):
    code, output = launch("python -m ddp_lab doctor", f"runs_dir={tmp_path}/runs", cold=True)
    assert code == 0, output
    assert [line.split(": ")[0].split(maxsplit=1)[1] for line in output.splitlines()] == CHECKS
    lines = output.splitlines()
    assert all(line.startswith("ok  ") for line in lines if ": 29500" not in line), output
    assert finding(lines, "devices").endswith(f"{HERE}: cpu (no GPU is visible)")
    assert "1,437 images to train on, 360 to test on, 1x28x28, 10 classes" in finding(lines, "dataset")
    assert not list((tmp_path / "runs").iterdir()), "the doctor left a file"


def test_doctor_under_torchrun_prints_each_finding_once(tmp_path):
    line = "torchrun --standalone --nproc_per_node=2 -m ddp_lab doctor strategy=ddp batch_size=7"
    code, output = launch(line, f"runs_dir={tmp_path}")
    assert code == 1, output  # torchrun's exit code
    for about in CHECKS[:-3]:  # the last three need a batch
        assert output.count(f" {about}: ") == 1, output
    assert "ok       strategy: ddp on 2 ranks: dp 2\n" in output
    assert output.count("error: 1 of 10 findings would stop this launch") == 1, output


def test_port_in_use_is_reported_by_the_rank_that_opens_the_store(tmp_path):
    """The other ranks would wait for it. One rank alone needs no port, so it is a warning."""
    busy = {"TORCHELASTIC_USE_AGENT_STORE": None, "WORLD_SIZE": "2"}
    case = Case("", "", ("", ""), env=busy)
    ((code, printed),) = (rank["busy"] for rank in run_world(1, run_cases, {"busy": case}, refusal_in_world, tmp_path))
    assert code == 2
    assert "cannot be opened (Address already in use). Start torchrun with" in printed
    case.env["WORLD_SIZE"] = "1"
    ((code, told, _),) = (rank["busy"] for rank in run_world(1, run_cases, {"busy": case}, doctor_in_world, tmp_path))
    assert code == 0
    assert finding(told, "ports").startswith("warning  ports: port ")
    assert finding(told, "strategy").startswith("warning  strategy: ddp has only one rank, so nothing is distributed. Use")


def main_of(line: str) -> None:
    main_in_world(*line.split())


def test_warnings_of_the_checks_are_in_the_log(tmp_path):
    """That of the host name on each node; that of the disk only if the run has no checkpoints yet, which will be deleted."""
    size = checkpoint_bytes(build(OmegaConf.load(ROOT / "conf/optimizer/sgd.yaml")), simple_cnn(3, 28, 10))
    run = f"{' '.join(SMALL)} data.dataset.train_size=125 data.val_fraction=0.2 name=mine runs_dir={tmp_path} strategy=ddp"
    case = Case(f"{run} epochs=1", "", ("", ""), {"GLOO_SOCKET_IFNAME": "lo"}, free=3 * size, host=NOWHERE, nodes=2)
    run_world(2, run_cases, {"first": case}, main_of, tmp_path)
    log = (tmp_path / "mine" / "train.log").read_text()
    assert log.count(f"WARNING {NO_NAME}") == log.count("WARNING") - 1 == 1
    assert (tmp_path / "mine" / "train.rank1.log").read_text().count(f"WARNING [rank 1] {NO_NAME}") == 1
    assert f"checkpoint.keep=2 of them, the best and the one being written need {4 * size / 2**20:,.1f} MiB" in log
    file = tmp_path / "mine" / "checkpoints" / "step_00000005.pt"
    assert size < file.stat().st_size < size + 2**14, "the file must contain the tensors and little else"
    run_world(2, run_cases, {"again": Case(f"{run} epochs=2", "", ("", ""), free=3 * size)}, main_of, tmp_path)
    assert (tmp_path / "mine" / "train.log").read_text().count("WARNING") == 2, "it warned although a checkpoint was there"


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
            [*namespace, *world, *line, "strategy=ddp", f"runs_dir={tmp_path}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert bool(ended.returncode) == bool(code), ended.stderr
        assert ("of shared memory, and /dev/shm has" in ended.stderr) == bool(code)
    assert [record["epoch"] for record in read_metrics(only_run(tmp_path))] == [1, 2]


@pytest.mark.parametrize(("optimizer", "options", "copies"), [("sgd", {"momentum": 0}, 1), ("sgd", {}, 2), ("adamw", {}, 3)])
def test_checkpoint_bytes_counts_model_averages_and_optimizer_state(optimizer, options, copies):
    cfg = OmegaConf.merge(OmegaConf.load(ROOT / f"conf/optimizer/{optimizer}.yaml"), options)
    sizes = [checkpoint_bytes(build(cfg), torch.nn.Linear(10, 10), ema) for ema in (False, True)]
    assert sizes == [copies * 110 * 4, (copies + 1) * 110 * 4]


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
