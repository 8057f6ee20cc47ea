"""Execution of a run: create its directory, train under the guard and the watchdog, record the outcome."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ddp_lab.checkpoints.checkpoints import Checkpoints, ignore
from ddp_lab.checkpoints.files import steps_in
from ddp_lab.checkpoints.find import result_in, run_of
from ddp_lab.checkpoints.mirror import Mirror
from ddp_lab.checkpoints.state import State
from ddp_lab.config.build import chosen_trackers
from ddp_lab.config.errors import TrainingError
from ddp_lab.config.types import SETS, Every
from ddp_lab.observe.log import log, setup_logging, telling
from ddp_lab.observe.logger import FileLogger, Logger
from ddp_lab.observe.metrics_file import describe_result, read_epochs, row_of
from ddp_lab.observe.trackers.background import Trackers
from ddp_lab.observe.trackers.base import TrackedRun
from ddp_lab.resilience.fault_injection import Fault
from ddp_lab.resilience.guard import Guard, Preempted, Requests
from ddp_lab.resilience.run_directory import RunDir
from ddp_lab.resilience.watchdog import Watchdog
from ddp_lab.run.checks import ChooseBatch, check_and_build, restore_lost
from ddp_lab.run.config_changes import record_config
from ddp_lab.run.data_record import record_data
from ddp_lab.run.job import Job, criterion
from ddp_lab.run.recorded_config import without_secrets
from ddp_lab.speed.cuda_graph import GraphStep
from ddp_lab.speed.fastest import build_step
from ddp_lab.training.hooks import Hook, Run, close_all
from ddp_lab.training.loop import fit, why_over
from ddp_lab.training.meter import Meter
from ddp_lab.training.not_finite import NotFiniteNotes
from ddp_lab.training.pictures import Pictures
from ddp_lab.training.profiler import Profiled
from ddp_lab.training.progress import Progress
from ddp_lab.training.step import TrainStep
from ddp_lab.training.sync import Sync
from ddp_lab.world.device import float32_matmul
from ddp_lab.world.host_memory import keep_freed_memory
from ddp_lab.world.runtime import Runtime

Outcome = Literal["finished", "preempted", "interrupted"]
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
    requests = Requests(runtime)
    requests.listen()
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
    before_exit = ExitStack()
    matmul, flags = float32_matmul(cfg.float32_matmul), job.options.backend_flags(runtime)
    with matmul, flags, Watchdog(run_dir, runtime, cfg.timeout, before_exit.close) as watchdog:
        launch = Launch(run_dir, watchdog, requests, before_exit)
        return train_guarded(cfg, job, checked.source, launch), run_dir.path


@dataclass(frozen=True)
class Launch:
    """What protects a run from the outside.

    Attributes:
        run_dir: of the run.
        watchdog: gets the phases.
        requests: to stop.
        before_exit: what the watchdog does before it ends this process.
    """

    run_dir: RunDir
    watchdog: Watchdog
    requests: Requests
    before_exit: ExitStack


def train_guarded(cfg: DictConfig, job: Job, source: Path | None, launch: Launch) -> str:
    """Resume, train, record the outcome in the run directory, and return it."""
    runtime, run_dir, watchdog = job.runtime, launch.run_dir, launch.watchdog
    fit_settings = replace(job.fit_settings, full_rate=job.full_rate())
    trainer = job.trainer()
    log.info(job.strategy.describe())
    best = criterion(cfg, job.dataset)
    sharded = is_sharded_format(cfg.checkpoint.format, runtime.world_size, job.checkpoint_bytes)
    fault = Fault(cfg.inject, runtime.rank, run_dir.path) if cfg.inject else None
    before_write = fault.before_write if fault else ignore
    folder = run_dir.path / "checkpoints"
    checkpoints = Checkpoints(folder, State.of(trainer, job.shapes), cfg.checkpoint.keep, best, sharded, before_write)
    progress = checkpoints.resume(source, job.plan.steps_before)
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
    launch.before_exit.callback(logger.close, "failed", {})
    with logger:
        watchdog.at("compiling" if job.options.compile else "preparing")
        steps_left = cfg.epochs * job.plan.steps_per_epoch - job.plan.steps_before(progress)
        with telling("preparing the training step: capturing or warming it up"):
            built = build_step(job.options, trainer.eager_step, job.loaders["train"], steps_left)
        # A GraphStep takes the batches of a DeviceLoader only; `options` disables cuda_graph for any other loader.
        step = cast("TrainStep", built)
        guard = make_guard(cfg, checkpoints, launch)
        meter = Meter(job.strategy.task, fit_settings, logger)
        hooks: list[Hook] = [guard, *([fault] if fault else []), meter, Pictures()]
        if cfg.checkpoint.mirror and runtime.rank == 0:
            # The watchdog ends a launch after cfg.timeout.
            hooks.append(Mirror(cfg.checkpoint.mirror, run_dir.path, cfg.timeout / 2))
        if cfg.profile:
            is_graph = isinstance(built, GraphStep)
            profiled = Profiled(runtime, logger, run_dir.path / "profile", is_graph, job.strategy.bubble)
            hooks = [profiled, *hooks, profiled.loading]
        every = fit_settings.log_every
        read = meter.read if every != Every() else None
        run = Run(
            eager=trainer.eager_step,
            step=step,
            loaders=job.loaders,
            settings=fit_settings,
            logger=logger,
            hooks=hooks,
            sync=Sync(job.strategy, trainer.eager_step.running_sums, every, guard.flags, read),
            position=progress,
            notes=NotFiniteNotes(runtime.rank == 0),
        )
        status = fit_and_close(run, launch.requests)
    result = {}
    if runtime.rank == 0:
        if status == "finished":
            result = log_result(job, run_dir, run.position, checkpoints)
        run_dir.end(status, guard.saved if status == "finished" else checkpoints.kept)
    logger.close(status, result)  # at the end: a scheduler may kill what waits for a tracker
    return status


def make_guard(cfg: DictConfig, checkpoints: Checkpoints, launch: Launch) -> Guard:
    """Return the guard that the config describes."""
    kept = {key: cfg.checkpoint[key] for key in ("every_epochs", "every_steps", "on_error", "at_steps")}
    kept |= {key: cfg[key] for key in ("on_nan", "check_replicas")}
    return Guard(checkpoints, launch.requests, launch.watchdog, **kept)


def fit_and_close(run: Run, requests: Requests) -> Outcome:
    """Train until the end, a request to stop, or an error that ends the training. Return how it has ended."""
    try:
        try:
            fit(run)
            status = "finished"
        except Preempted:
            status = "interrupted" if requests.interrupted else "preempted"
        close_all(run.hooks, status)
    except TrainingError:
        close_all(run.hooks, "failed")  # the last valid checkpoint may still be in the writer thread, or not uploaded
        raise
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
