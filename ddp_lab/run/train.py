"""Execution of a run: create its directory, train under the guard and the watchdog, record the outcome."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ddp_lab.checkpoints.checkpoints import Checkpoints
from ddp_lab.checkpoints.files import steps_in
from ddp_lab.checkpoints.find import result_in, run_of
from ddp_lab.checkpoints.mirror import Mirror
from ddp_lab.config.build import chosen_trackers
from ddp_lab.config.errors import TrainingError
from ddp_lab.config.types import SETS
from ddp_lab.observe.log import log, setup_logging, telling
from ddp_lab.observe.logger import FileLogger, Logger
from ddp_lab.observe.metrics_file import describe_result, read_epochs, row_of
from ddp_lab.observe.profiler import Profiled
from ddp_lab.observe.trackers.background import Trackers
from ddp_lab.observe.trackers.base import TrackedRun
from ddp_lab.resilience.decisions import Decisions
from ddp_lab.resilience.fault_injection import Fault
from ddp_lab.resilience.guard import Guard, Preempted
from ddp_lab.resilience.run_directory import RunDir
from ddp_lab.resilience.watchdog import Watchdog
from ddp_lab.run.checks import ChooseBatch, check_and_build, restore_lost
from ddp_lab.run.config_changes import record_config
from ddp_lab.run.data_record import record_data
from ddp_lab.run.job import Job, criterion
from ddp_lab.run.recorded_config import without_secrets
from ddp_lab.speed.cuda_graph import GraphStep
from ddp_lab.speed.fastest import build_step
from ddp_lab.training.loop import why_over
from ddp_lab.training.progress import Progress
from ddp_lab.training.step import TrainStep
from ddp_lab.world.device import float32_matmul
from ddp_lab.world.host_memory import keep_freed_memory
from ddp_lab.world.runtime import Runtime

SHARDED_FROM = 4 * 2**30  # size in bytes of a checkpoint from which checkpoint.format=auto shards it


def train(
    cfg: DictConfig, runtime: Runtime, choose_batch: ChooseBatch, check_memory: Callable[[DictConfig, Job], None]
) -> tuple[str, Path]:
    """Train according to the config. Collective.

    Args:
        cfg: The config.
        runtime: The ranks.
        choose_batch, check_memory: As in `check_and_build`.

    Returns:
        How the run ended, "finished", "preempted" or "interrupted" by Ctrl-C, and its directory.

    Raises:
        ConfigError: The config, the run directory or a checkpoint to resume from cannot be used.
        TrainingError: Training cannot continue, for example because the loss is not finite.
    """
    choices = HydraConfig.get().runtime.choices
    if runtime.device.type == "cpu":
        keep_freed_memory()
    restore_lost(cfg, runtime)
    check = partial(check_and_build, cfg, runtime, choose_batch, check_memory)
    checked = runtime.succeed("checks", check)
    job = checked.job
    label = f"{choices['model']}-{choices['data']}-{choices['strategy']}"
    run_dir = RunDir(runtime, Path(cfg.runs_dir), cfg.name, cfg.resume, label)
    decisions = Decisions(runtime)
    decisions.listen()
    setup_logging(run_dir.path, runtime.rank)
    for finding in checked.findings if runtime.local_rank == 0 else ():
        if finding.level == "warning":
            log.warning(finding.text)
    log.info(f"{run_dir.path}: {choices['model']} on {choices['data']}, {cfg.precision}")
    log.info(job.plan)
    if job.dataset.val is not None:
        log.info(job.dataset.describe_sets())
    if runtime.rank == 0 and (text := job.plan.warning()):
        log.warning(text)
    for note in job.notes:
        log.info(note)
    if run_dir.failure and runtime.rank == 0:
        log.warning(f"started again after {run_dir.failure}")
    matmul, flags = float32_matmul(cfg.float32_matmul), job.options.backend_flags(runtime)
    with matmul, flags, Watchdog(run_dir, runtime, cfg.timeout) as watchdog:
        return train_guarded(cfg, job, checked.source, run_dir, watchdog, decisions), run_dir.path


def train_guarded(
    cfg: DictConfig, job: Job, source: Path | None, run_dir: RunDir, watchdog: Watchdog, decisions: Decisions
) -> str:
    """Resume, train, record the outcome in the run directory, and return it."""
    runtime, fit_settings = job.runtime, replace(job.fit_settings, full_rate=job.full_rate())
    trainer = job.trainer()
    log.info(job.strategy.describe())
    best = criterion(cfg, job.dataset)
    sharded = is_sharded_format(cfg.checkpoint.format, runtime.world_size, job.checkpoint_bytes)
    checkpoints = Checkpoints(run_dir.path / "checkpoints", trainer.state, cfg.checkpoint.keep, best, sharded)
    mirror = Mirror(cfg.checkpoint.mirror, run_dir.path) if cfg.checkpoint.mirror and runtime.rank == 0 else None
    if mirror:
        checkpoints.after_write = mirror.upload
    trainer.position = progress = checkpoints.resume(source, job.plan.steps_before)
    if runtime.rank == 0:
        record_data(run_dir.path, job.dataset, best)
    if reasons := why_over(progress, job.fit_settings):
        if runtime.rank == 0:
            why, raised = " and ".join(reasons.values()), " and ".join(reasons)
            log.info(f"nothing to do: {why}; raise {raised} to continue, or use another name")
            log_result(job, run_dir, progress, checkpoints)
            run_dir.end("finished", progress)
        return "finished"

    logger = Logger()
    if runtime.rank == 0:
        for line in record_config(run_dir.path, cfg, runtime.world_size, source and run_of(source)):
            log.info(line)
        logger = open_logger(cfg, job, run_dir.path, progress)
    watchdog.before_exit = partial(logger.close, "failed", {})
    with logger:
        watchdog.at("compiling" if job.options.compile else "preparing")
        steps_left = cfg.epochs * job.plan.steps_per_epoch - job.plan.steps_before(progress)
        with telling("preparing the training step: capturing or warming it up"):
            step = build_step(job.options, trainer.eager_step, job.loaders["train"], steps_left)
        # A GraphStep takes the batches of a DeviceLoader only; `options` disables cuda_graph for any other loader.
        trainer.train_step = cast("TrainStep", step)
        if cfg.inject:
            trainer.train_step = Fault(step, cfg.inject, runtime.rank, run_dir.path, checkpoints, progress.step)
        profile = None
        if cfg.profile:
            graph, folder = isinstance(step, GraphStep), run_dir.path / "profile"
            trainer.train_step = profile = Profiled(trainer.train_step, runtime, logger, folder, graph, job.strategy.bubble)
        keys = ("every_epochs", "every_steps", "on_error", "at_steps")
        kept = {key: cfg.checkpoint[key] for key in keys}
        decisions.begin(progress.step, trainer.eager_step.running_sums)
        kept |= {"on_nan": cfg.on_nan, "check_replicas": cfg.check_replicas}
        guard = Guard(checkpoints, decisions, watchdog, progress, **kept)
        watchdog.at("loading", progress.epoch, progress.step + 1)
        try:
            try:
                trainer.fit_loaders(job.loaders, fit_settings, logger, guard)
                status = "finished"
            except Preempted:
                status = "interrupted" if decisions.interrupted else "preempted"
            finally:
                if profile:
                    profile.end()
            guard.finish()
        except TrainingError:
            checkpoints.wait()  # the last valid checkpoint may still be in the writer thread
            if mirror:
                mirror.finish(cfg.timeout / 2)
            raise
    if mirror:
        mirror.finish(cfg.timeout / 2)  # the watchdog ends a launch after cfg.timeout
    has_result = status == "finished" and runtime.rank == 0
    result = log_result(job, run_dir, trainer.position, checkpoints) if has_result else {}
    if runtime.rank == 0:
        run_dir.end(status, guard.progress if status == "finished" else checkpoints.kept)
    logger.close(status, result)  # at the end: a scheduler may kill what waits for a tracker
    return status


def is_sharded_format(choice: str, ranks: int, size: int) -> bool:
    """Return whether checkpoints are sharded.

    Args:
        choice: the config key `checkpoint.format`.
        ranks: number of ranks.
        size: bytes of a checkpoint.
    """
    return choice == "sharded" or (choice == "auto" and ranks > 1 and size >= SHARDED_FROM)


def log_result(job: Job, run_dir: RunDir, progress: Progress, checkpoints: Checkpoints) -> dict[str, Any]:
    """Log, and return for the trackers, the epoch whose weights are the result, its metrics, and the checkpoint.

    Args:
        job: of the run.
        run_dir: of the run.
        progress: at the end of the run.
        checkpoints: of the run.
    """
    if found := result_in(checkpoints.folder, checkpoints.best):
        path, best = found
        epoch, criterion = best.epoch - 1, checkpoints.best
    else:
        path = (steps_in(checkpoints.folder) or [checkpoints.folder])[-1]
        epoch, criterion = progress.epoch - 1, None
    metrics = run_dir.path / "metrics.jsonl"
    values = [row[checkpoints.best] for row in read_epochs(metrics) if checkpoints.best in row]
    if values and not any(value is not None for value in values):
        never = f"{checkpoints.best} was not finite in any epoch"
        log.info(f"{never}, so that none is the best: the last weights are the result")
    log.info(describe_result(metrics, epoch, criterion, path, job.strategy.where))
    row = row_of(metrics, epoch)
    return {"epoch": epoch, "checkpoint": str(path)} | {key: row[key] for key in row if key.partition("_")[0] in SETS}


def open_logger(cfg: DictConfig, job: Job, run_dir: Path, progress: Progress) -> FileLogger:
    """Return the logger of rank 0."""
    plan, choices = job.plan, HydraConfig.get().runtime.choices
    config = cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=True))
    hparams = (
        {group: choices[group] for group in ("data", "model", "strategy", "optimizer", "scheduler")}
        | {key: cfg[key] for key in ("epochs", "precision", "seed")}
        | {"lr": plan.lr, "global_batch_size": plan.global_batch_size, "devices": job.strategy.num_devices}
    )
    run = TrackedRun(run_dir, "", without_secrets(config), hparams, start=(progress.epoch, progress.step))
    return FileLogger(
        run_dir,
        start=run.start,
        constants={
            "global_batch_size": plan.global_batch_size,
            "world_size": plan.world_size,
            "strategy": job.strategy.name,
        },
        trackers=Trackers(chosen_trackers(config["tracker"], config["tracker_options"]), run, patience=cfg.timeout / 4),
        classes=job.dataset.classes,
    )
