"""The command `ddp-lab doctor`: what a report of a bug needs, and the checks before a run."""

import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from ddp_lab.checkpoints.mirror import Mirror
from ddp_lab.config.errors import NodeError, count
from ddp_lab.launchers.arguments import installed
from ddp_lab.launchers.preflight import Finding, check_shared
from ddp_lab.run.job import Job
from ddp_lab.world.device import list_devices
from ddp_lab.world.runtime import Runtime

PACKAGES = ("ddp_lab", "torch", "torchvision", "numpy", "hydra-core", "omegaconf", "pydantic")
# Environment variables that change what a launch does. Of Slurm's many, those of its shape.
VARIABLES = re.compile(
    r"(CUDA|NVIDIA|NCCL|GLOO|TORCH|PYTORCH|TRITON|OMP|MKL|PET|DDP_LAB|MASTER|WANDB|MLFLOW|HF|AWS)_\w+|TORCHELASTIC\w+|RANK|WORLD_SIZE|(LOCAL|GROUP)_(RANK|WORLD_SIZE)|NPROC_PER_NODE|SLURM_(JOB_NUM_NODES|GPUS_ON_NODE|CPUS_PER_TASK)|PYTHONPATH|LD_LIBRARY_PATH|LD_PRELOAD"
)
SECRET = re.compile(r"key|token|secret|passw|credential|auth|cookie|headers", re.IGNORECASE)
# user and password, and parameters
IN_URL = re.compile(r"(?<=//)[^/@\s]+(?=@)|(?<=[?&])[^=&\s]+=[^&\s]+")


def introduce(usual: Mapping[str, Any], current: Mapping[str, Any]) -> list[Finding]:
    """Return what a report of a bug needs before the findings.

    It has versions, environment variables and config, without secrets.

    Args:
        usual: the default values, by key.
        current: those of this launch.
    """
    root = Path(__file__).parents[2]
    source = "from a wheel"
    if (root / ".git").exists() and shutil.which("git"):
        described = subprocess.run(
            ["git", "-C", root, "describe", "--always", "--dirty"], capture_output=True, text=True
        )
        source = f"commit {described.stdout.strip() or 'unknown'}"

    if torch.version.cuda:
        cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    else:
        cuda = "torch without CUDA"

    versions = [
        *map(installed, PACKAGES),
        source,
        f"Python {platform.python_version()}",
        cuda,
        platform.platform(),
    ]
    environment = [
        f"{key}={shown(key, value)}"
        for key, value in sorted(os.environ.items())
        if VARIABLES.fullmatch(key)
    ]

    changed = [
        f"{key}={shown(key, value)}"
        for key, value in current.items()
        if key not in usual or usual[key] != value
    ]
    return [
        Finding("ok", "versions", ", ".join(versions)),
        Finding("ok", "environment", " ".join(environment) or "no variable that matters"),
        Finding("ok", "config", " ".join(changed) or "the defaults"),
    ]


def shown(key: str, value: object) -> str:
    """Return a value for a report that strangers read, without secrets.

    A secret is known by the name of its key or its place in a URL.
    """
    return "(hidden)" if SECRET.search(key) and value else IN_URL.sub("(hidden)", str(value))


def diagnose(
    runtime: Runtime, prepare: Callable[[], Job], mirror: Callable[[], Mirror] | None
) -> None:
    """Print one line per finding about the machines and the run. Collective.

    The first rank of each machine prints what concerns its machine, and rank 0 everything else.

    Args:
        runtime: the ranks.
        prepare: constructs the run, and makes the checks of train.py. Collective.
        mirror: constructs the mirror of the checkpoints; None: there is none.

    Raises:
        ConfigError: train.py would raise it, too.
    """
    show([describe_devices(), describe_backend(runtime)], runtime.local_rank == 0)
    if mirror is not None:
        where = runtime.broadcast_from_rank0("mirror", lambda: mirror().remote)
        show([Finding("ok", "mirror", f"checkpoints go to {shown('', where)}")], runtime.is_main)
    job = prepare()
    settings = job.settings
    assert settings is not None, "`prepare` makes them"
    findings = settings.findings

    if find_corrupt := job.dataset.find_corrupt:
        runtime.broadcast_from_rank0("files", find_corrupt, per_node=True)
    writable = [check_shared(settings.runs_dir, runtime)] if runtime.nodes == 1 else []
    show([*findings, *writable, *describe(job)], runtime.is_main)
    show(
        [finding for finding in findings if finding.level == "warning"],
        runtime.local_rank == 0 < runtime.rank,
    )


def show(findings: list[Finding], here: bool) -> None:
    """Print the findings if this is the rank that does."""
    for finding in findings if here else ():
        print(finding, flush=True)


def describe_devices() -> Finding:
    """Return a finding that lists every visible GPU with its index, name and memory."""
    listed = f"{socket.gethostname()}: {list_devices()}"
    if not torch.cuda.is_available() and Path("/proc/driver/nvidia/version").exists():
        if torch.version.cuda is None:
            remedy = "this torch is a CPU build; install one for CUDA"
        else:
            remedy = "check CUDA_VISIBLE_DEVICES"
        return Finding(
            "warning", "devices", f"{listed}, though NVIDIA's driver is loaded; {remedy}"
        )
    return Finding("ok", "devices", listed)


def describe_backend(runtime: Runtime) -> Finding:
    """Return a finding that names the communication backend.

    Raises:
        NodeError: This build of torch has no backend for the chosen device.
    """
    cuda = runtime.device.type == "cuda"
    if cuda:
        name = "nccl"
        available = dist.is_nccl_available()
    else:
        name = "gloo"
        available = dist.is_gloo_available()
    if not available:
        raise NodeError(
            f"torch {torch.__version__} on {socket.gethostname()} is built without {name}; install "
            "one that has it"
        )
    version = " " + ".".join(map(str, nccl.version())) if cuda else ""
    return Finding("ok", "backend", f"{name}{version} of torch {torch.__version__}")


def describe(job: Job) -> list[Finding]:
    """Return findings with the run's sizes; a warning if the training set is less than a batch."""
    dataset = job.dataset
    strategy = job.strategy
    sizes = job.sizes
    sizes_of_sets = {
        name: "a stream" if samples.is_endless else f"{samples.size:,}"
        for name, samples in dataset.sets.items()
    }
    sets = ", ".join(f"{name} {size}" for name, size in sizes_of_sets.items())
    inputs, _ = dataset.train.first
    shape = "x".join(map(str, dataset.train.shape))
    kind = f"images of {shape}" if isinstance(inputs, torch.Tensor) else "inputs of several parts"
    images = f"{kind}, {count(len(dataset.classes), 'class')}"
    parameters = sum(parameter.numel() for parameter in job.model.parameters())
    axes = " x ".join(f"{axis} {size}" for axis, size in strategy.axes.items())
    warning = sizes.warning()
    return [
        Finding("ok", "dataset", f"{sets} {images}"),
        Finding("ok", "model", count(parameters, "parameter")),
        Finding("ok", "strategy", f"{strategy.name} on {strategy.where}: {axes}"),
        Finding("warning", "batch", warning) if warning else Finding("ok", "batch", str(sizes)),
    ]
