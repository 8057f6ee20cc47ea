"""The preflight checks of train.py, and the findings of `ddp-lab doctor`."""

import contextlib
import io
import math
import os
import re
import shutil
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launches import ROOT, SMALL, launch, only_run, read_metrics, refusal_in_world
from namespaces import launch_where_mounted
from omegaconf import OmegaConf
from worlds import once, run_world

from ddp_lab.checkpoints.state import checkpoint_bytes
from ddp_lab.commands import doctor
from ddp_lab.config.build import build_optimizer
from ddp_lab.launchers import preflight

CHECKS = [
    "versions",
    "environment",
    "config",
    "devices",
    "backend",
    "runs_dir",
    "dataset",
    "model",
    "strategy",
    "batch",
]
NOWHERE = "no-such-host.invalid"
HERE = socket.gethostname()
WORKERS = "data=synthetic data.loader=workers model=simple_cnn batch_size=24"


def shared_bytes(image: int) -> int:
    """Return what two ranks of two workers need, to train and to test, in pages.

    They need batches of 12 images, and their queues.
    """
    pages = math.ceil(12 * image / 4096) + 1
    return 2 * 2 * ((2 * 2 + 2) * pages * 4096 + 2**17)


@dataclass
class Case:
    """A launch of two ranks on a machine with a problem.

    Attributes:
        line: overrides. FOLDER is replaced by a directory, NODE by the number of the node.
        message: an excerpt of the error.
        env: environment variables; None: without it.
        free: free bytes of /dev/shm.
        nodes: number of machines.
    """

    line: str = ""
    message: str = ""
    env: dict[str, str | None] = field(default_factory=dict)
    free: int | None = None
    nodes: int = 1


MEMORY = (
    f"need {shared_bytes(3 * 28 * 28) / 2**20:.1f} MiB of shared memory, and /dev/shm has 0.2 MiB "
    "free. Lower data."
)
REFUSED = {
    "no address": Case(
        message=f"MASTER_ADDR={NOWHERE}: does not resolve on ", env={"MASTER_ADDR": NOWHERE}
    ),
    "silent store": Case(
        message="MASTER_ADDR=127.0.0.1, MASTER_PORT=9: does not accept connections from ",
        env={"MASTER_PORT": "9"},
    ),
    "not shared": Case(
        "runs_dir=FOLDER/NODE",
        f"is not shared by all nodes: {HERE} does not see the file that rank 0",
        nodes=2,
    ),
    "no folder": Case(
        "runs_dir=/proc/nowhere",
        "runs_dir=/proc/nowhere: cannot create the run directory there (",
        nodes=2,
    ),
    "memory": Case(WORKERS, MEMORY, free=2**18),
}


def run_case(case: Case, function, folder: Path, patch: pytest.MonkeyPatch):
    """Call a function on this rank with the overrides of a case."""
    rank = int(os.environ["RANK"])
    local = 2 // case.nodes
    places = {"LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local, "GROUP_RANK": rank // local}
    for key, value in ({key: str(number) for key, number in places.items()} | case.env).items():
        patch.delenv(key, raising=False) if value is None else patch.setenv(key, value)
    if case.free is not None:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=case.free))
    # seconds; enough, because the tests use no network file system
    patch.setattr(preflight, "TOKEN_WAIT", 0.5)
    line = f"strategy=ddp {case.line}" + (
        "" if "runs_dir=" in case.line else " runs_dir=FOLDER/runs"
    )
    return function(line.replace("FOLDER", str(folder)).replace("NODE", str(rank // local)))


def run_cases(cases: dict[str, Case], function, folder: Path) -> dict:
    """Run cases one after another on this rank, each in a folder of its own.

    Return what `function` returns, by name.
    """
    results = {}
    for name, case in cases.items():
        with pytest.MonkeyPatch.context() as patch:
            results[name] = run_case(case, function, folder / name.replace(" ", "_"), patch)
    return results


@once
def refusals(folder: Path) -> list[dict]:
    return run_world(2, run_cases, REFUSED, refusal_in_world, folder, timeout=300)


@pytest.mark.parametrize("name", REFUSED)
def test_train_refuses_a_machine_before_it_writes_anything(name, tmp_path):
    folder = tmp_path.parent / "refused"
    first, second = (rank[name] for rank in refusals(folder))
    code, printed = first
    assert code == 2
    assert printed.startswith("error: ")
    assert REFUSED[name].message in printed
    assert printed.count("\n") == 1
    assert second == (2, ""), "one rank reports it"
    assert not list((folder / name.replace(" ", "_")).glob("*/[!.]*")), "a rejected run left a file"


def test_doctor_prints_a_finding_for_every_check_and_writes_nothing(command, tmp_path):
    code, output, errors = command(doctor.main, f"runs_dir={tmp_path}/runs", "device=cpu")
    assert (code, errors) == (0, "")
    lines = dict(line.split(maxsplit=1)[1].split(": ", 1) for line in output.splitlines())
    assert list(lines) == CHECKS
    assert output.count("ok       ") == len(CHECKS)
    assert lines["devices"].startswith(f"{HERE}: cpu")
    assert lines["dataset"] == "train 384, test 96 images of 1x28x28, 10 classes"
    assert lines["batch"] == "1 rank, global batch 64 = 1 x 64, 6 steps an epoch, lr 0.1"
    assert not list((tmp_path / "runs").iterdir())
    code, output, _ = command(
        doctor.main,
        f"runs_dir={tmp_path}/runs",
        "device=cpu",
        *SMALL,
        "batch_size=102",
        "strategy=ddp",
    )
    warnings = [line for line in output.splitlines() if line.startswith("warning ")]
    assert [line.split(":")[0] for line in warnings] == ["warning  strategy", "warning  batch"], (
        output
    )
    assert warnings[0].endswith(
        "has one rank, so nothing is distributed. Use, for example, `ddp-lab train --nproc 2 "
        "strategy=ddp`"
    )
    code, output, errors = command(doctor.main, "patience=3", "device=cpu")
    assert (code, errors.startswith("error: patience=3: needs a validation set")) == (2, True)


def test_doctor_reports_versions_environment_and_config_without_secrets(
    command, monkeypatch, tmp_path
):
    """A refused config has the report, too: the key that may be a secret does not exist."""
    environment = {
        "WANDB_API_KEY": "s3cr3t",
        "MLFLOW_TRACKING_URI": "https://me:s3cr3t@host/a?sig=s3cr3t",
        "EDITOR": "s3cr3t",
    }
    for key, value in (environment | {"NCCL_DEBUG": "INFO"}).items():
        monkeypatch.setenv(key, value)
    line = [
        f"runs_dir={tmp_path}",
        "data=synthetic",
        "epochs=3",
        "+model.api_token=s3cr3t",
        f"data.root={tmp_path}//me:s3cr3t@host",
    ]
    code, output, errors = command(doctor.main, *line)
    assert (code, errors.startswith("error: model.api_token")) == (2, True), errors
    lines = dict(line.split(maxsplit=1)[1].split(": ", 1) for line in output.splitlines())
    assert list(lines) == ["versions", "environment", "config"]
    assert f"torch {torch.__version__}".split("+")[0] in lines["versions"]
    assert "ddp_lab " in lines["versions"]
    assert re.search(r", commit [0-9a-f]{7}", lines["versions"])
    variables = lines["environment"].split()
    assert {
        "WANDB_API_KEY=(hidden)",
        "MLFLOW_TRACKING_URI=https://(hidden)@host/a?(hidden)",
        "NCCL_DEBUG=INFO",
    } <= {*variables}
    assert {"epochs=3", "model.api_token=(hidden)", f"runs_dir={tmp_path}"} <= {
        *lines["config"].split()
    }
    assert "data.dataset._target_=ddp_lab.data.datasets." in lines["config"]
    assert "batch_size" not in lines["config"], "it has its default"
    assert "s3cr3t" not in output


def doctor_in_world(line: str) -> str:
    """Run the doctor on this rank, and return what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        doctor.main(line.split())
    return printed.getvalue()


def test_doctor_on_two_nodes_prints_each_finding_once_and_the_devices_of_each(tmp_path):
    case = Case(nodes=2)
    first, second = (
        rank["two"] for rank in run_world(2, run_cases, {"two": case}, doctor_in_world, tmp_path)
    )
    assert "runs is writable and shared\n" in first
    assert all(first.count(f"ok       {about}: ") == 1 for about in [*CHECKS, "network"]), first
    assert "ok       strategy: ddp on 2 x cpu: dp 2\n" in first
    assert first.count("devices: ") == second.count("devices: ") == 1
    assert second.count("\n") == 2


@pytest.mark.parametrize(
    ("optimizer", "options", "copies"),
    [("sgd", {"momentum": 0}, 1), ("sgd", {}, 2), ("adamw", {}, 3)],
)
def test_checkpoint_bytes_counts_model_averages_and_optimizer_state(optimizer, options, copies):
    cfg = OmegaConf.merge(OmegaConf.load(ROOT / f"conf/optimizer/{optimizer}.yaml"), options)
    make_optimizer = build_optimizer(cfg)
    model = torch.nn.Linear(10, 10)
    sizes = [checkpoint_bytes(make_optimizer, model, ema) for ema in (False, True)]
    assert sizes == [copies * 110 * 4, (copies + 1) * 110 * 4]


@pytest.mark.gpu(1)
def test_doctor_lists_a_real_gpu(tmp_path):
    code, output = launch("python -m ddp_lab doctor", f"runs_dir={tmp_path}", gpus=True)
    assert code == 0, output
    assert f"cuda:0 ({torch.cuda.get_device_name(0)}, " in output
    assert " backend: nccl" in output


def test_doctor_reports_a_torch_without_the_backend(command, monkeypatch):
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    code, _, errors = command(doctor.main, "device=cpu")
    assert (code, "is built without gloo; install one that has it" in errors) == (2, True)


@pytest.mark.slow
def test_run_trains_in_the_shared_memory_that_the_check_asks_for(tmp_path):
    line = [
        *WORKERS.split(),
        "data.dataset.train_size=480",
        "data.dataset.image_size=128",
        "device=cpu",
        "epochs=2",
    ]
    needed = shared_bytes(3 * 128 * 128)
    # 64 KiB for the ranks' heartbeats
    for size, code in ((needed - 2**20, 2), (needed + 2**16, 0)):
        mounted = f"-t tmpfs -o size={size} none /dev/shm"
        ended = launch_where_mounted(mounted, *line, "strategy=ddp", f"runs_dir={tmp_path}")
        assert bool(ended.returncode) == bool(code), ended.stderr
        assert ("of shared memory, and /dev/shm has" in ended.stderr) == bool(code)
    assert [record["epoch"] for record in read_metrics(only_run(tmp_path))] == [1, 2]


def test_node_waits_until_it_sees_the_file_of_rank_0(tmp_path):
    """A network file system shows it later than on the node that has written it."""
    token = tmp_path / ".token"
    later = threading.Timer(0.3, token.touch)
    later.start()
    assert preflight._try_token(token, rank=1) == ""
    later.join()
    assert [path.name for path in tmp_path.iterdir()] == [".token"]
