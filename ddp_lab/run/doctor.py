"""The command `ddp-lab doctor`, below its arguments: the checks of the machines and of the parts of a run."""

import json
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch.cuda import nccl

from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.data.dataset import Dataset
from ddp_lab.launch.preflight import Finding, check_host_name, check_master, check_shared_memory
from ddp_lab.launch.storage import check_free_disk, check_shared, checkpoint_bytes
from ddp_lab.models.make import make_model
from ddp_lab.run.checks import ChooseBatch
from ddp_lab.run.job import Job, arrange, check_optimizer, criterion, load_dataset, make_loaders, make_loss, make_mix, make_plan
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.plan import Plan
from ddp_lab.world.device import list_devices
from ddp_lab.world.runtime import Runtime

T = TypeVar("T")


class Findings(list[Finding]):
    """The findings of one rank, in the order of the checks."""

    def look(self, about: str, check: Callable[[], T], describe: Callable[[T], str | Finding] = str) -> T | None:
        """Run a check, append its finding, and return its result; None if it raised a ConfigError, which is then the finding.

        Args:
            about: Name of the check.
            check: Returns a result, or raises a ConfigError. If the result is a Finding, that is appended.
            describe: Returns the finding, or its text, for another result.
        """
        try:
            result = check()
        except ConfigError as error:
            self.append(Finding("error", about, str(error)))
            return None
        finding = result if isinstance(result, Finding) else describe(result)
        self.append(finding if isinstance(finding, Finding) else Finding("ok", about, finding))
        return result


def diagnose(cfg: DictConfig, choose_batch: ChooseBatch, check_memory: Callable[[DictConfig, Job], str]) -> None:
    """Print one line per finding about the machines and the config, on one rank. Collective.

    Raises:
        NodeError: At least one finding is an error.
    """
    findings = Findings()
    make = partial(Runtime, precision=cfg.precision, timeout=cfg.timeout)
    # If the requested GPU is missing, the other checks run on the CPU.
    runtime = findings.look("devices", lambda: make(cfg.device), describe_devices) or make("cpu")
    with runtime:
        findings.look("backend", lambda: find_backend(runtime))
        findings.look("host name", lambda: check_host_name(runtime))
        reached = findings.look("ports", lambda: check_master(runtime))
        if runtime.world_size > 1 and reached is None:  # the ranks cannot exchange their findings
            conclude(findings, show=runtime.local_rank == 0)
        findings.look("runs_dir", lambda: check_shared(Path(cfg.runs_dir), runtime))
        auto = "auto" in (cfg.batch_size, cfg.accumulate)
        if not auto or findings.look("auto", lambda: choose_batch(cfg, runtime, None)) is not None:
            examine(cfg, runtime, findings, check_memory)
        everyone = runtime.collect("findings", json.dumps(findings))
    if everyone is not None:  # the other ranks exit with code 0: otherwise torchrun would end rank 0 before it reports
        found = dict.fromkeys(Finding(*finding) for mine in everyone for finding in json.loads(mine))  # without duplicates
        order = list(dict.fromkeys(finding.about for finding in found))
        conclude(sorted(found, key=lambda finding: order.index(finding.about)), show=True)


def conclude(findings: list[Finding], show: bool) -> None:
    """Print the findings if `show` is true.

    Raises:
        NodeError: At least one finding is an error.
    """
    if show:
        print(*findings, sep="\n", flush=True)
    if errors := sum(finding.level == "error" for finding in findings):
        raise NodeError(f"{errors} of {len(findings)} findings would stop this launch; see above")


def examine(cfg: DictConfig, runtime: Runtime, findings: Findings, check_memory: Callable[[DictConfig, Job], str]) -> None:
    """Construct the parts of a run one by one, and append the findings. A check whose part is missing is skipped."""
    choices = HydraConfig.get().runtime.choices
    strategy: Strategy | None = findings.look("strategy", lambda: build(cfg.strategy, runtime), describe_strategy)
    dataset = findings.look("dataset", lambda: load_dataset(cfg, runtime), partial(describe_dataset, choices["data"]))
    if dataset is None:
        return
    built = findings.look(
        "model",
        lambda: make_model(cfg.model, dataset.model_shape(), runtime, cfg.seed),
        lambda built: f"{choices['model']}, {sum(parameter.numel() for parameter in built.model.parameters()):,} parameters",
    )
    root, checkpoint = Path(cfg.runs_dir), cfg.checkpoint
    if built is not None and runtime.rank == 0 and root.is_dir():
        size = checkpoint_bytes(build(cfg.optimizer), built.model, cfg.ema is not None)
        rest = checkpoint.keep, criterion(cfg, dataset) is not None, checkpoint.on_error
        findings.look("free disk", lambda: check_free_disk(root, cfg.name, size, *rest))
    if strategy is None:
        return
    plan = findings.look("batch", lambda: make_plan(cfg, strategy, dataset), describe_plan)
    if plan is None:
        return
    loss = findings.look(
        "loss",
        lambda: (make_loss(cfg, dataset), make_mix(cfg, strategy, dataset, plan)),
        lambda _: f"{choices['loss']} of a value per sample, mixup={cfg.mixup:g}, cutmix={cfg.cutmix:g}",
    )
    if built is None or loss is None:
        return

    def distribute() -> Job:
        job = arrange(cfg, strategy, dataset, plan, built)
        check_optimizer(cfg, strategy)
        return job

    job = findings.look(
        "partition",
        distribute,
        lambda _: f"{strategy.name} can distribute {choices['model']} and {plan.samples_at_once} samples at once",
    )
    if job is None:
        return
    if strategy.device.type == "cuda":
        findings.look("memory", lambda: check_memory(cfg, job))
    mine = findings if runtime.local_rank == 0 else Findings()  # the free bytes change while the ranks look
    ranks = runtime.local_world_size
    mine.look("loader", lambda: check_shared_memory(make_loaders(cfg, job).values(), ranks))


def describe_devices(runtime: Runtime) -> Finding:
    """Return a finding that lists every visible GPU with its index, name and memory."""
    listed = f"{socket.gethostname()}: {list_devices()}"
    if not torch.cuda.is_available() and Path("/proc/driver/nvidia/version").exists():
        remedy = (
            "this torch is a CPU build; install one for CUDA" if torch.version.cuda is None else "check CUDA_VISIBLE_DEVICES"
        )
        return Finding("warning", "devices", f"{listed}, though NVIDIA's driver is loaded; {remedy}")
    return Finding("ok", "devices", listed)


def find_backend(runtime: Runtime) -> str:
    """Return a description of the communication backend.

    Raises:
        NodeError: This build of torch has no backend for the chosen device.
    """
    cuda = runtime.device.type == "cuda"
    name, available = ("nccl", dist.is_nccl_available()) if cuda else ("gloo", dist.is_gloo_available())
    if not available:
        raise NodeError(f"torch {torch.__version__} on {socket.gethostname()} is built without {name}; install one that has it")
    version = " " + ".".join(map(str, nccl.version())) if cuda else ""
    return f"{name}{version} of torch {torch.__version__} connects ranks on {'GPUs' if cuda else 'CPUs'}"


def describe_dataset(name: str, dataset: Dataset) -> str:
    """Return the sizes, the shape of an image and the number of classes of a dataset."""
    purposes = {"train": "images to train on", "val": "to validate with", "test": "to test on"}
    sizes = ", ".join(f"{found.size:,} {purposes[key]}" for key, found in dataset.sets.items())
    return f"{name}, {sizes}, {'x'.join(map(str, dataset.train.shape))}, {len(dataset.classes)} classes"


def describe_plan(plan: Plan) -> Finding:
    """Return a finding with the batch sizes and the learning rate; a warning if the batch is larger than the training set."""
    text = plan.warning()
    return Finding("warning", "batch", text) if text else Finding("ok", "batch", str(plan))


def describe_strategy(strategy: Strategy) -> Finding:
    """Return a finding with the strategy's mesh; a warning if the strategy needs several ranks and has one."""
    ranks = strategy.runtime.world_size
    if ranks == 1 and not strategy.one_process:
        start = f"torchrun --standalone --nproc_per_node=2 -m ddp_lab doctor strategy={strategy.name}"
        return Finding(
            "warning", "strategy", f"{strategy.name} has only one rank, so nothing is distributed. Use, for example, `{start}`"
        )
    axes = " x ".join(f"{axis} {size}" for axis, size in strategy.axes.items())
    return Finding("ok", "strategy", f"{strategy.name} on {ranks} rank{'s' * (ranks > 1)}: {axes}")
