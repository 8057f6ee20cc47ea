"""The command `ddp-lab doctor`, below its arguments: the checks of train.py before it creates the run directory."""

import socket
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.cuda import nccl

from ddp_lab.config.errors import NodeError
from ddp_lab.launchers.preflight import Finding, check_shared
from ddp_lab.run.checks import ChooseBatch, check_and_build
from ddp_lab.run.job import Job
from ddp_lab.world.device import list_devices
from ddp_lab.world.runtime import Runtime


def diagnose(cfg: DictConfig, choose_batch: ChooseBatch, check_memory: Callable[[DictConfig, Job], None]) -> None:
    """Print one line per finding about the machines and the run. Collective.

    The first rank of each machine prints what concerns its machine, and rank 0 everything else.

    Raises:
        ConfigError: train.py would raise it, too.
    """
    with Runtime(cfg.device, cfg.precision, cfg.timeout) as runtime:
        show([describe_devices(), describe_backend(runtime)], runtime.local_rank == 0)
        checked = check_and_build(cfg, runtime, choose_batch, check_memory)
        job, findings = checked.job, checked.findings
        if find_corrupt := job.dataset.find_corrupt:
            runtime.agree("files", find_corrupt, per_node=True)
        writable = [check_shared(Path(cfg.runs_dir), runtime)] if runtime.nodes == 1 else []
        show([*findings, *writable, *describe(job)], runtime.rank == 0)
        show([finding for finding in findings if finding.level == "warning"], runtime.local_rank == 0 < runtime.rank)


def show(findings: list[Finding], here: bool) -> None:
    """Print the findings if this is the rank that does."""
    for finding in findings if here else ():
        print(finding, flush=True)


def describe_devices() -> Finding:
    """Return a finding that lists every visible GPU with its index, name and memory."""
    listed = f"{socket.gethostname()}: {list_devices()}"
    if not torch.cuda.is_available() and Path("/proc/driver/nvidia/version").exists():
        remedy = (
            "this torch is a CPU build; install one for CUDA" if torch.version.cuda is None else "check CUDA_VISIBLE_DEVICES"
        )
        return Finding("warning", "devices", f"{listed}, though NVIDIA's driver is loaded; {remedy}")
    return Finding("ok", "devices", listed)


def describe_backend(runtime: Runtime) -> Finding:
    """Return a finding that names the communication backend.

    Raises:
        NodeError: This build of torch has no backend for the chosen device.
    """
    cuda = runtime.device.type == "cuda"
    name, available = ("nccl", dist.is_nccl_available()) if cuda else ("gloo", dist.is_gloo_available())
    if not available:
        raise NodeError(f"torch {torch.__version__} on {socket.gethostname()} is built without {name}; install one that has it")
    version = " " + ".".join(map(str, nccl.version())) if cuda else ""
    return Finding("ok", "backend", f"{name}{version} of torch {torch.__version__}")


def describe(job: Job) -> list[Finding]:
    """Return findings with the sizes of the run's parts; a warning if the batch is larger than the training set."""
    dataset, strategy, plan = job.dataset, job.strategy, job.plan
    sizes = ", ".join(f"{name} {found.size:,}" for name, found in dataset.sets.items())
    images = f"images of {'x'.join(map(str, dataset.train.shape))}, {len(dataset.classes)} classes"
    parameters = sum(parameter.numel() for parameter in job.model.parameters())
    axes = " x ".join(f"{axis} {size}" for axis, size in strategy.axes.items())
    warning = plan.warning()
    return [
        Finding("ok", "dataset", f"{sizes} {images}"),
        Finding("ok", "model", f"{parameters:,} parameters"),
        Finding("ok", "strategy", f"{strategy.name} on {strategy.where}: {axes}"),
        Finding("warning", "batch", warning) if warning else Finding("ok", "batch", str(plan)),
    ]
