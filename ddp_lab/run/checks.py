"""The checks of a run before its directory is created: everything that can be refused is refused here."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from ddp_lab.checkpoints.files import is_sharded, steps_in
from ddp_lab.checkpoints.find import find_checkpoint, open_checkpoint
from ddp_lab.data.folder import listed
from ddp_lab.launch.preflight.finding import Finding
from ddp_lab.launch.preflight.network import check_network
from ddp_lab.launch.preflight.shared_memory import check_shared_memory
from ddp_lab.launch.preflight.storage import check_storage
from ddp_lab.resilience.run_directory import find_launch
from ddp_lab.run.data_record import compare_data, compare_held_out
from ddp_lab.run.job import Job, prepare
from ddp_lab.run.selection import criterion
from ddp_lab.world.runtime import Runtime


def check_and_prepare(cfg: DictConfig, runtime: Runtime, check_memory: Callable[[Job], object]) -> tuple[Job, list[Finding]]:
    """Return the prepared job and the findings of the preflight checks. The run directory is not created.

    Args:
        cfg: The config.
        runtime: The ranks.
        check_memory: Raises a ConfigError if the state of a prepared job does not fit on its GPUs. Collective.

    Raises:
        ConfigError: The config cannot be used, or a machine cannot take part in the run.
    """
    findings = check_network(runtime)
    launch = runtime.launch
    progress = runtime.agree("progress", partial(find_progress, cfg, launch))
    job = prepare(cfg, runtime, with_weights=progress is None)
    if progress:
        other_files = runtime.agree("classes", partial(compare_data, run_of(progress), job.dataset))
        seen = runtime.agree("held out", partial(compare_held_out, run_of(progress), job.dataset, resumes=True))
        job.may_have_seen = seen is not None
        findings += [Finding("warning", "dataset", text) for text in (other_files, seen) if text]
    if runtime.world_size == 1 and not job.strategy.one_process and not runtime.under_torchrun:
        line = f"ddp-lab train --nproc {max(2, len(runtime.devices))} strategy={job.strategy.name}"
        text = f"strategy={job.strategy.name}: has one rank, so nothing is distributed. Use, for example, `{line}`"
        findings.append(Finding("warning", "strategy", text))
    job.check_optimizer()
    check_memory(job)
    if any(loader.shared_bytes for loader in job.loaders.values()):  # on all ranks or on none
        loaders, ranks = job.loaders.values(), runtime.local_world_size
        runtime.agree("shared_memory", lambda: str(check_shared_memory(loaders, ranks)), per_node=True)
    size = job.checkpoint_bytes
    keep, best, on_error = cfg.checkpoint.keep, criterion(cfg, job.dataset) is not None, cfg.checkpoint.on_error
    findings += check_storage(runtime, Path(cfg.runs_dir), cfg.name, size, keep, best, on_error)
    if skipped := job.dataset.skipped:
        text = f"data.on_corrupt=skip: {len(skipped)} files cannot be decoded and are left out: {listed(skipped)}"
        findings.append(Finding("warning", "dataset", text))
    if cfg.resume not in ("auto", "never") and (path := find_checkpoint(Path(cfg.runs_dir), cfg.resume, runtime)):
        runtime.agree("resume", lambda: open_checkpoint(path).check(job.shapes))
    return job, findings


def find_progress(cfg: DictConfig, launch: str) -> str | None:
    """Return the checkpoint, or the directory of checkpoints, that the run resumes from; None if it begins anew.

    Args:
        launch: `Runtime.launch`.
    """
    if cfg.resume != "auto":
        return None if cfg.resume == "never" else cfg.resume
    name = cfg.name or find_launch(Path(cfg.runs_dir), launch)
    folder = Path(cfg.runs_dir) / name / "checkpoints" if name else None
    return str(folder) if folder and steps_in(folder) else None


def run_of(progress: str) -> Path:
    """Return the directory of the run that a checkpoint, or a directory of checkpoints, belongs to."""
    path = Path(progress)
    return path.parent if path.is_dir() and not is_sharded(path) else path.absolute().parents[1]
