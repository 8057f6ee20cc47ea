"""Looks for what would stop a launch, before it is one: a line for each finding, and for a bad one its remedy.

python -m ddp_lab.doctor data=fashion_mnist                                             the words of train.py
torchrun --standalone --nproc_per_node=2 -m ddp_lab.doctor strategy=ddp                 as the launch will be started

Trains nothing and leaves no run directory; fetches a dataset that is missing, as train.py would. Exit code 0, or 2 where a
finding is an error.
"""

import json
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ddp_lab.config.build import build
from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.data.datasets import Dataset
from ddp_lab.launch.command_line import CONF, record, user_errors
from ddp_lab.launch.preflight import Finding, check_free_disk, check_host_name, check_master, check_shared, checkpoint_bytes
from ddp_lab.run.job import Job
from ddp_lab.strategies.base import Strategy
from ddp_lab.world.runtime import Runtime, list_devices

T = TypeVar("T")


class Findings(list[Finding]):
    """One rank's, in the order of the checks."""

    def look(self, about: str, check: Callable[[], T], describe: Callable[[T], str | Finding]) -> T | None:
        """What `check` returns, described in a finding; None where it raises a mistake, which becomes one."""
        try:
            result = check()
        except ConfigError as error:
            self.append(Finding("error", about, str(error)))
            return None
        said = describe(result)
        self.append(said if isinstance(said, Finding) else Finding("ok", about, said))
        return result


@record
@user_errors
@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
@user_errors
def main(cfg: DictConfig) -> None:
    check(cfg)
    findings = Findings()
    make = partial(Runtime, precision=cfg.precision, timeout=cfg.timeout)
    # Without the GPU asked for, the other checks go on on the CPU.
    runtime = findings.look("devices", lambda: make(cfg.device), describe_devices) or make("cpu")
    with runtime:
        findings.look("backend", lambda: find_backend(runtime), str)
        findings.look("host name", lambda: check_host_name(runtime), as_it_is)
        reached = findings.look("ports", lambda: check_master(runtime), as_it_is)
        if runtime.world_size > 1 and reached is None:  # nobody to put findings together with
            conclude(findings, tell=runtime.local_rank == 0)
        findings.look("runs_dir", lambda: check_shared(Path(cfg.runs_dir), runtime), as_it_is)
        examine(cfg, runtime, findings)
        everyone = runtime.collect("findings", json.dumps(findings))
    if everyone is not None:  # the others leave with code 0: with another torchrun would end rank 0 before it has told
        conclude(merge([Finding(*finding) for mine in everyone for finding in json.loads(mine)]), tell=True)


def merge(findings: list[Finding]) -> list[Finding]:
    """Of each check what the ranks found, each thing once: what a node alone can find names the node."""
    order = list(dict.fromkeys(finding.about for finding in findings))
    return sorted(dict.fromkeys(findings), key=lambda finding: order.index(finding.about))


def conclude(findings: list[Finding], tell: bool) -> None:
    """Prints the findings.

    Raises:
        NodeError: there are errors among them.
    """
    if tell:
        print(*findings, sep="\n", flush=True)
    if errors := sum(finding.level == "error" for finding in findings):
        raise NodeError(f"{errors} of {len(findings)} findings would stop this launch; they stand above")


def examine(cfg: DictConfig, runtime: Runtime, findings: Findings) -> None:
    """Makes the parts of a run one by one; what needs a part that could not be made is left out."""
    choices, job = HydraConfig.get().runtime.choices, Job(cfg, runtime)
    strategy = findings.look("strategy", lambda: job.strategy, describe_strategy)
    dataset = findings.look("dataset", lambda: job.dataset, partial(describe_dataset, choices.data))
    if dataset is None:
        return
    model = findings.look(
        "model",
        lambda: job.model,
        lambda model: f"{choices.model}, {sum(parameter.numel() for parameter in model.parameters()):,} parameters",
    )
    root, checkpoint = Path(cfg.runs_dir), cfg.checkpoint
    if model is not None and runtime.rank == 0 and root.is_dir():
        size = checkpoint_bytes(build(cfg.optimizer), model)
        findings.look(
            "free disk", lambda: check_free_disk(root, cfg.name, size, checkpoint.keep, checkpoint.on_error), as_it_is
        )
    if strategy is None:
        return
    plan = findings.look("batch", lambda: job.plan, str)
    if model is not None and plan is not None:
        findings.look(
            "partition",
            job.partition,
            lambda _: f"{strategy.name} can spread {choices.model} and {plan.samples_at_once} samples at once",
        )


def as_it_is(finding: Finding) -> Finding:
    return finding


def describe_devices(runtime: Runtime) -> Finding:
    """Every GPU that is visible, by index, name and memory."""
    listed = f"{socket.gethostname()}: {list_devices()}"
    if not torch.cuda.is_available() and Path("/proc/driver/nvidia/version").exists():
        why = (
            "this torch is a CPU build: install one for CUDA" if torch.version.cuda is None else "look at CUDA_VISIBLE_DEVICES"
        )
        return Finding("warning", "devices", f"{listed}, though NVIDIA's driver is loaded; {why}")
    return Finding("ok", "devices", listed)


def find_backend(runtime: Runtime) -> str:
    """
    Raises:
        NodeError: this torch cannot connect ranks on the device chosen.
    """
    cuda = runtime.device.type == "cuda"
    name, there = ("nccl", dist.is_nccl_available()) if cuda else ("gloo", dist.is_gloo_available())
    if not there:
        raise NodeError(f"torch {torch.__version__} on {socket.gethostname()} is built without {name}; install one that has it")
    version = " " + ".".join(map(str, torch.cuda.nccl.version())) if cuda else ""
    return f"{name}{version} of torch {torch.__version__} connects ranks on {'GPUs' if cuda else 'CPUs'}"


def describe_dataset(name: str, dataset: Dataset) -> str:
    sizes = f"{len(dataset.train.targets):,} images to train on, {len(dataset.test.targets):,} to test on"
    return f"{name}, {sizes}, {'x'.join(map(str, dataset.train.images.shape[1:]))}, {len(dataset.classes)} classes"


def describe_strategy(strategy: Strategy) -> Finding:
    ranks = strategy.runtime.world_size
    if ranks == 1 and not strategy.one_process:
        start = f"torchrun --standalone --nproc_per_node=2 -m ddp_lab.doctor strategy={strategy.name}"
        return Finding(
            "warning", "strategy", f"{strategy.name} has one rank, so nothing to spread. Start, for example, `{start}`"
        )
    axes = " x ".join(f"{axis} {size}" for axis, size in strategy.axes.items())
    return Finding("ok", "strategy", f"{strategy.name} on {ranks} rank{'s' * (ranks > 1)}: {axes}")


if __name__ == "__main__":
    main()
