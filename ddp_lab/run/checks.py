"""The checks of a run before its directory is created: everything that can be refused is refused here."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from ddp_lab.checkpoints.find import find_checkpoint, find_source, open_checkpoint, run_of
from ddp_lab.checkpoints.mirror import Mirror
from ddp_lab.config.errors import ConfigError
from ddp_lab.data.dataset import Dataset
from ddp_lab.launchers.preflight import Finding, check_network, check_shared, check_shared_memory
from ddp_lab.resilience.run_directory import find_launch
from ddp_lab.run.data_record import compare_data
from ddp_lab.run.job import Job, build
from ddp_lab.tasks.base import Task
from ddp_lab.training.profiler import check_profile
from ddp_lab.world.runtime import Runtime

# By the set that a metric needs: how it is called, and what to use without it.
NEEDED = {
    "val": ("validation", "data.val_fraction=0.1, or with data=folder a folder val/"),
    "test": ("test", "val_loss, or add a test set"),
}

ChooseBatch = Callable[[DictConfig, Runtime, Path | None], str]


class Checked(NamedTuple):
    """A run that may begin.

    Attributes:
        job: the run.
        findings: of the preflight checks.
        source: what it resumes from, as from `find_source`.
    """

    job: Job
    findings: list[Finding]
    source: Path | None


def check_and_build(
    cfg: DictConfig, runtime: Runtime, choose_batch: ChooseBatch, check_memory: Callable[[DictConfig, Job], None]
) -> Checked:
    """Construct a run and check everything that can be checked before its directory is created. Collective.

    Args:
        cfg: The config.
        runtime: The ranks.
        choose_batch: Replaces batch_size=auto in the config by a number, given the directory of the run that is resumed, and
            returns a line for the log. Collective.
        check_memory: Raises a ConfigError if the state of a job does not fit on its GPUs. Collective.

    Raises:
        ConfigError: The config cannot be used, or a machine cannot take part in the run.
    """
    findings = check_network(runtime)
    source = agree_on_source(cfg, runtime)
    chosen = choose_batch(cfg, runtime, run_of(source) if source else None)
    job = build(cfg, runtime, with_weights=source is None)
    job.notes.extend([chosen] * bool(chosen))
    check_selection(cfg, job.dataset, job.task)
    if cfg.profile:
        check_profile(cfg.epochs * job.plan.steps_per_epoch, job.strategy.device)
    if source and (other := runtime.agree("data", partial(compare_data, run_of(source), job.dataset, resumes=True))):
        findings.append(Finding("warning", "dataset", other))
    if runtime.world_size == 1 and not job.strategy.one_process and not runtime.under_torchrun:
        line = f"ddp-lab train --nproc {max(2, len(runtime.devices))} strategy={job.strategy.name}"
        text = f"strategy={job.strategy.name}: has one rank, so nothing is distributed. Use, for example, `{line}`"
        findings.append(Finding("warning", "strategy", text))
    check_memory(cfg, job)
    if any(loader.shared_bytes for loader in job.loaders.values()):  # on all ranks or on none
        loaders, ranks = job.loaders.values(), runtime.local_world_size
        runtime.agree("shared_memory", lambda: check_shared_memory(loaders, ranks), per_node=True)
    if runtime.nodes > 1:  # on a single node, RunDir checks the directory
        findings.append(check_shared(Path(cfg.runs_dir), runtime))
    if source and source != run_of(source) / "checkpoints" and (path := find_checkpoint(source.parent, str(source), runtime)):
        runtime.agree("resume", lambda: open_checkpoint(path).check(job.shapes))
    return Checked(job, findings, source)


def check_selection(cfg: DictConfig, dataset: Dataset, task: Task) -> None:
    """Check that the sets and metrics exist that choose the best checkpoint, the result of a sweep, and the last epoch.

    Raises:
        ConfigError: one does not.
    """
    wanted = {"checkpoint.best": cfg.checkpoint.best, "optimize": cfg.optimize, "patience": cfg.patience}
    for key, value in wanted.items():
        name, _, metric = ("val", "", "") if key == "patience" and value else str(value).partition("_")
        known = task.choosing(len(dataset.classes))
        if metric and metric not in known:
            raise ConfigError(
                f"{key}={value}: {type(task).__name__} has no such metric for these data; allowed: "
                f"{', '.join(f'{name}_{each}' for each in known)}. A task of your own names others in its attribute `better`"
            )
        if name in NEEDED and name not in dataset.sets:
            what, remedy = NEEDED[name]
            raise ConfigError(f"{key}={value}: needs a {what} set, which these data do not have. Use {remedy}")


def restore_lost(cfg: DictConfig, runtime: Runtime) -> None:
    """Download the checkpoints of a named run that this disk has not, if it has a mirror. Collective.

    Raises:
        ConfigError: As `Mirror.begin`.
    """

    def restore() -> None:
        mirror = Mirror(cfg.checkpoint.mirror, Path(cfg.runs_dir) / (cfg.name or "unnamed"))
        if cfg.name:
            mirror.begin(cfg.resume)

    if cfg.checkpoint.mirror:
        runtime.agree("mirror", restore)


def agree_on_source(cfg: DictConfig, runtime: Runtime) -> Path | None:
    """Return what the run resumes from, as from `find_source`. Collective."""
    launch, runs_dir = runtime.launch, Path(cfg.runs_dir)

    def find() -> str | None:
        restarted = find_launch(runs_dir, launch) if runtime.under_torchrun else None
        source = find_source(runs_dir, cfg.name, cfg.resume, restarted)
        return None if source is None else str(source)

    source = runtime.agree("source", find)
    return None if source is None else Path(source)
