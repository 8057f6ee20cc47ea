"""The checks of a run before its directory is created: what can be refused is refused here."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_lab.checkpoints.find import find_checkpoint, find_source, open_checkpoint, run_of
from ddp_lab.config.errors import ConfigError
from ddp_lab.data.dataset import Dataset
from ddp_lab.resilience.run_directory import find_launch
from ddp_lab.run.data_record import compare_data
from ddp_lab.run.job import Job, RunSettings
from ddp_lab.tasks.base import Task
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:
    from ddp_lab.launchers.preflight import Finding

# By the set that a metric needs: how it is called, and what to use without it.
NEEDED = {
    "val": ("validation", "data.val_fraction=0.1, or with data=folder a folder val/"),
    "test": ("test", "val_loss, or add a test set"),
}

SELECTING = ("checkpoint.best", "optimize", "patience")


def check_job(job: Job, settings: RunSettings) -> None:
    """Check that a run may begin, or resume from its source.

    Collective. Findings are added to those of its settings.

    Raises:
        ConfigError: it may not, or a machine cannot take part in it.
    """
    runtime = job.runtime
    source = settings.source
    if source:
        compare = partial(compare_data, run_of(source), job.dataset, resumes=True)
        other = runtime.broadcast_from_rank0("data", compare)
        if other:
            settings.findings.append(warning("dataset", other))

    if runtime.world_size == 1 and not job.strategy.one_process and not runtime.under_torchrun:
        line = f"ddp-lab train --nproc {max(2, len(runtime.devices))} strategy={job.strategy.name}"
        text = (
            f"strategy={job.strategy.name}: has one rank, so nothing is distributed. Use, for "
            f"example, `{line}`"
        )
        settings.findings.append(warning("strategy", text))

    if any(loader.shared_bytes for loader in job.loaders.values()):  # on all ranks or on none
        from ddp_lab.launchers.preflight import check_shared_memory

        loaders = job.loaders.values()
        ranks = runtime.local_world_size
        runtime.broadcast_from_rank0(
            "shared_memory", lambda: check_shared_memory(loaders, ranks), per_node=True
        )

    if runtime.nodes > 1:  # on a single node, RunDir checks the directory
        from ddp_lab.launchers.preflight import check_shared

        settings.findings.append(check_shared(settings.runs_dir, runtime))
    path = None
    if source and source != run_of(source) / "checkpoints":
        path = find_checkpoint(source.parent, str(source), runtime)
    if path:
        runtime.broadcast_from_rank0("resume", lambda: open_checkpoint(path).check(job.shapes))


def warning(name: str, text: str) -> "Finding":
    """Return a finding that is a warning."""
    from ddp_lab.launchers.preflight import Finding

    return Finding("warning", name, text)


def check_selection(wanted: Mapping[str, Any], dataset: Dataset, task: Task) -> None:
    """Check that the sets and metrics exist by which a run chooses.

    It chooses the best checkpoint, the result of a sweep, and the last epoch.

    Args:
        wanted: the values of the keys SELECTING.
        dataset: of the run.
        task: of the run.

    Raises:
        ConfigError: one does not.
    """
    for key, value in wanted.items():
        name, _, metric = str(value).partition("_")
        if key == "patience" and value:
            name = "val"
            metric = ""
        known = task.monitorable(len(dataset.classes))
        if metric and metric not in known:
            raise ConfigError(
                f"{key}={value}: {type(task).__name__} has no such metric for these data; allowed: "
                f"{', '.join(f'{name}_{each}' for each in known)}. A task of your own names others "
                "in its attribute `metric_mode`"
            )

        if name in NEEDED and name not in dataset.sets:
            what, remedy = NEEDED[name]
            raise ConfigError(
                f"{key}={value}: needs a {what} set, which these data do not have. Use {remedy}"
            )


def restore_lost(
    mirror: str, runs_dir: Path, name: str | None, resume: str, runtime: Runtime
) -> None:
    """Download the checkpoints of a named run that this disk has not from its mirror. Collective.

    Args:
        mirror: its URL.
        runs_dir, name, resume: the keys of the config.
        runtime: the ranks.

    Raises:
        ConfigError: As `Mirror.begin`.
    """

    from ddp_lab.checkpoints.mirror import Mirror

    def restore() -> None:
        copies = Mirror(mirror, runs_dir / (name or "unnamed"))
        if name:
            copies.begin(resume)

    runtime.broadcast_from_rank0("mirror", restore)


def agree_on_source(runs_dir: Path, name: str | None, resume: str, runtime: Runtime) -> Path | None:
    """Return what the run resumes from, as from `find_source`.

    Collective. Arguments as in `restore_lost`.
    """
    launch = runtime.launch

    def find() -> str | None:
        restarted = find_launch(runs_dir, launch) if runtime.under_torchrun else None
        source = find_source(runs_dir, name, resume, restarted)
        return None if source is None else str(source)

    source = runtime.broadcast_from_rank0("source", find)
    return None if source is None else Path(source)
