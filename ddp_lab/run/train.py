"""Execution of a run: create its directory, train under guard and watchdog, record the outcome."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ddp_lab.checkpoints.checkpoints import Checkpoints, ignore, is_sharded_format
from ddp_lab.checkpoints.files import steps_in
from ddp_lab.checkpoints.find import result_in, run_of
from ddp_lab.checkpoints.state import State
from ddp_lab.config.errors import TrainingError
from ddp_lab.config.types import SETS, Every
from ddp_lab.launchers.recorded_config import CONFIG, write_config
from ddp_lab.observe.log import log, log_held, log_if_slow, print_if_slow, setup_logging
from ddp_lab.observe.logger import FileLogger, Logger
from ddp_lab.observe.metrics_file import describe_result, read_evaluations, row_at
from ddp_lab.resilience.guard import Guard, Preempted, Requests
from ddp_lab.resilience.run_directory import RunDir, note_stragglers
from ddp_lab.resilience.watchdog import Watchdog
from ddp_lab.run.data_record import record_data, record_environment
from ddp_lab.run.job import Job, RunSettings
from ddp_lab.training.hooks import Hook, Run, close_all
from ddp_lab.training.loop import fit, stop_reasons
from ddp_lab.training.meter import Meter
from ddp_lab.training.pictures import Pictures
from ddp_lab.training.plan import FitSettings
from ddp_lab.training.progress import Progress
from ddp_lab.training.schedule import ShapeByMetric
from ddp_lab.training.step import TrainStep
from ddp_lab.training.sync import Sync
from ddp_lab.training.trainer import Trainer
from ddp_lab.world.device import float32_matmul
from ddp_lab.world.process import keep_freed_memory, note, print_line
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:
    from ddp_lab.resilience.fault_injection import Fault
    from ddp_lab.training.callbacks import Callback
    from ddp_lab.training.energy import EnergyMeter
    from ddp_lab.training.plateau import PlateauSchedule
    from ddp_lab.training.stragglers import Stragglers
    from ddp_lab.training.timed_schedule import TimedSchedule

Outcome = Literal["finished", "preempted", "interrupted"]


def train(job: Job) -> tuple[Outcome, Path]:
    """Train a job that is prepared. Collective.

    Returns:
        How the run ended, "finished", "preempted" or "interrupted" by Ctrl-C, and its directory.

    Raises:
        ConfigError: The run directory or a checkpoint to resume from cannot be used.
        TrainingError: Training cannot continue, for example because the loss is not finite.
    """
    runtime = job.runtime
    settings = job.settings
    assert settings is not None, "`prepare` makes them"
    if runtime.device.type == "cpu":
        keep_freed_memory()
    before_exit = ExitStack()
    matmul = float32_matmul(settings.float32_matmul)
    flags = job.options.backend_flags(runtime)
    with matmul, flags:
        # a plan that does not fit the model is refused before a directory is created
        with (
            print_if_slow("trying the plan, and placing the model", runtime.is_main),
            log_held() as early,
        ):
            placed = place(job) if job.strategy.tries_plan else None
        run_dir = RunDir(runtime, settings.runs_dir, settings.name, settings.resume, settings.label)
        if runtime.local_rank == 0:
            note(run_dir=str(run_dir.path.absolute()), error=None)
        requests = Requests(runtime)
        requests.listen()
        setup_logging(run_dir.path, runtime.rank)
        log_beginning(job, settings, run_dir)
        early.pass_on()
        with Watchdog(run_dir, runtime, settings.timeout, before_exit.close) as watchdog:
            launch = Launch(run_dir, watchdog, requests, before_exit)
            return train_guarded(job, settings, launch, placed), run_dir.path


class Placed(NamedTuple):
    """A job whose model is on its devices.

    Attributes:
        fit_settings: with the full rate of the devices.
        trainer: of the model.
    """

    fit_settings: FitSettings
    trainer: Trainer


def place(job: Job) -> Placed:
    """Connect the ranks, and place the model on its devices. Collective."""
    fit_settings = replace(job.fit_settings, full_rate=job.full_rate())
    if job.compares_ranks:
        job.strategy.time_work()
    return Placed(fit_settings, job.trainer())


def log_beginning(job: Job, settings: RunSettings, run_dir: RunDir) -> None:
    """Log what the run consists of, and what the checks before it have found."""
    runtime = job.runtime
    for finding in settings.findings if runtime.local_rank == 0 else ():
        if finding.level == "warning":
            log.warning(finding.text)
    if runtime.local_rank == 0 and runtime.node > 0:
        print_line(where_output_is(runtime, run_dir.path), sys.stdout)
    log.info(f"{run_dir.path}: {settings.title}")
    log.info(job.sizes)
    if job.dataset.val is not None:
        log.info(job.dataset.describe_sets())
    for text in (job.sizes.warning(), job.horizon.warning()):
        if runtime.is_main and text is not None:
            log.warning(text)
    for line in job.notes:
        log.info(line)
    if run_dir.failure and runtime.is_main:
        log.warning(f"started again after {run_dir.failure}")


def where_output_is(runtime: Runtime, run_dir: Path) -> str:
    """Return a line for a machine without rank 0, which prints nothing else."""
    last = runtime.rank + runtime.local_world_size - 1
    ranks = f"ranks {runtime.rank} to {last} train"
    if last == runtime.rank:
        ranks = f"rank {last} trains"
    host, _ = runtime.master
    return f"{ranks} here; the output is that of rank 0 on {host}, also in {run_dir}/train.log"


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


def train_guarded(
    job: Job, settings: RunSettings, launch: Launch, placed: Placed | None = None
) -> Outcome:
    """Resume, train, record the outcome in the run directory, and return it.

    Args:
        job: that is prepared.
        settings: of the run.
        launch: what protects the run.
        placed: the job, if its model is already on its devices.
    """
    runtime = job.runtime
    run_dir = launch.run_dir
    with log_if_slow("placing the model on its devices"):
        fit_settings, trainer = placed or place(job)
    log.info(job.strategy.describe())
    fault = make_fault(settings, runtime.rank, run_dir.path)
    checkpoints = make_checkpoints(job, settings, run_dir.path, trainer, fault)
    schedules = resumed_schedules(job)
    progress = resume(job, settings, checkpoints, schedules)
    fit_settings = fit_settings.continued(progress, job.sizes.steps_before(progress))
    if runtime.is_main:
        seed = job.loaders["train"].options.seed
        record_data(run_dir.path, job.dataset, checkpoints.best, seed)
    if reasons := stop_reasons(progress, fit_settings):
        if runtime.is_main:
            why = " and ".join(reasons.values())
            raised = " and ".join(reasons)
            log.info(f"nothing to do: {why}; raise {raised} to continue, or use another name")
            log_result(job, run_dir, progress, checkpoints)
            run_dir.end("finished", progress)
        return "finished"

    logger = Logger()
    if runtime.is_main:
        record_settings(run_dir.path, settings, runtime.world_size)
        record_environment(run_dir.path, settings.config, job.strategy.where, job.shapes)
        logger = open_logger(job, settings, run_dir.path, progress)
    launch.before_exit.callback(logger.close, "failed", {})
    energy = open_energy(job, progress)
    with logger:
        launch.watchdog.heartbeat.at("compiling" if job.options.compile else "preparing")
        step = make_step(job, trainer, progress)
        guard = make_guard(checkpoints, settings, launch)
        meter = None
        if fit_settings.log_every != Every():
            meter = Meter(job.strategy.task, fit_settings, logger)
        stragglers = make_stragglers(job, settings, logger, run_dir.path)
        # schedules come before a checkpoint, which has their state then
        first = [*schedules, guard, fault, meter, stragglers]
        hooks = [hook for hook in first if hook is not None]
        hooks += make_hooks(job, settings, run_dir.path)
        if settings.profile:
            hooks = profiled(hooks, job, run_dir.path, logger, step is not trainer.eager_step)
        run = Run(
            eager=trainer.eager_step,
            step=step,
            loaders=job.loaders,
            settings=fit_settings,
            logger=logger,
            hooks=[*hooks, *callbacks_of(job, run_dir.path)],
            sync=Sync(
                strategy=job.strategy,
                running_sums=trainer.eager_step.running_sums,
                every=fit_settings.log_every,
                flags=guard.flags,
                read=None if meter is None else meter.read,
                work=stragglers,
            ),
            position=progress,
            metrics=job.metrics,
            energy=energy,
        )
        status = fit_and_close(run, guard)

    result = {}
    if runtime.is_main:
        if status == "finished":
            result = log_result(job, run_dir, run.position, checkpoints)
        run_dir.end(status, guard.saved if status == "finished" else checkpoints.kept)
    logger.close(status, result)  # at the end: a scheduler may kill what waits for a tracker
    return status


def make_fault(settings: RunSettings, rank: int, run_dir: Path) -> "Fault | None":
    """Return the hook that causes the fault of the key `inject`; None if there is none."""
    if not settings.inject:
        return None
    from ddp_lab.resilience.fault_injection import Fault

    return Fault(settings.inject, rank, run_dir)


def make_checkpoints(
    job: Job, settings: RunSettings, run_dir: Path, trainer: Trainer, fault: "Fault | None"
) -> Checkpoints:
    """Return what writes and reads the checkpoints of a run."""
    chosen = settings.checkpoint
    return Checkpoints(
        folder=run_dir / "checkpoints",
        state=State.of(trainer, job.shapes),
        keep=chosen.keep,
        best=chosen.best,
        sharded=is_sharded_format(chosen.format, job.runtime.world_size, job.checkpoint_bytes),
        before_write=ignore if fault is None else fault.before_write,
    )


def resume(
    job: Job,
    settings: RunSettings,
    checkpoints: Checkpoints,
    schedules: "Sequence[TimedSchedule | PlateauSchedule]",
) -> Progress:
    """Return the position at which training goes on, and load the state that it had there.

    Args:
        job: that is placed on its devices.
        settings: of the run, with the source of its checkpoint.
        checkpoints: of the run.
        schedules: those whose state is in checkpoints.

    Raises:
        ConfigError: the checkpoint does not fit the run.
    """

    def resume_schedules(progress: Progress) -> int:
        """Return the steps of the schedule before a position, whose end the schedule takes over."""
        job.horizon.continue_at(progress.step, job.sizes.steps_before(progress))
        for schedule in schedules:
            schedule.resume(progress)
        if text := job.horizon.describe(progress.step):
            log.info(text)
        return job.horizon.position(progress.step)

    progress = checkpoints.resume(settings.source, resume_schedules)
    readers = job.dataset.train.readers
    if readers or progress.stream:
        from ddp_lab.training.stream_position import check_resumed

        check_resumed(progress, readers)
    return progress


def resumed_schedules(job: Job) -> "list[TimedSchedule | PlateauSchedule]":
    """Return the parts of the learning-rate schedule whose state is in checkpoints."""
    schedules = (timed_schedule(job), plateau_schedule(job))
    return [schedule for schedule in schedules if schedule is not None]


def timed_schedule(job: Job) -> "TimedSchedule | None":
    """Return what predicts the end of the schedule; None if no time limits the run."""
    if job.fit_settings.max_minutes is None:
        return None
    from ddp_lab.training.timed_schedule import TimedSchedule

    return TimedSchedule(job.horizon, job.fit_settings.max_minutes, job.sizes.global_batch_size)


def plateau_schedule(job: Job) -> "PlateauSchedule | None":
    """Return what gives evaluations to the schedule; None if it does not depend on them."""
    if not isinstance(job.shape, ShapeByMetric):
        return None
    from ddp_lab.training.plateau import Plateau, PlateauSchedule

    assert isinstance(job.shape, Plateau), "the only such shape"
    prefers_low = job.lower_is_better(job.shape.metric.removeprefix("val_"))
    return PlateauSchedule(job.shape, job.sizes.lr, prefers_low, job.horizon.warmup_steps)


def make_guard(checkpoints: Checkpoints, settings: RunSettings, launch: Launch) -> Guard:
    """Return the hook that saves checkpoints, compares replicas and stops the run."""
    chosen = settings.checkpoint
    return Guard(
        checkpoints,
        launch.requests,
        launch.watchdog.heartbeat,
        every_epochs=chosen.every_epochs,
        every_steps=chosen.every_steps,
        every_minutes=chosen.every_minutes,
        at_steps=chosen.at_steps,
        on_error=chosen.on_error,
        on_nan=settings.on_nan,
        check_replicas=settings.check_replicas,
    )


def make_stragglers(
    job: Job, settings: RunSettings, logger: Logger, run_dir: Path
) -> "Stragglers | None":
    """Return the hook that names ranks which are slower than the others; None: nothing does."""
    if not job.compares_ranks:
        return None
    from ddp_lab.training.stragglers import Detector, Stragglers

    chosen = settings.straggler
    assert chosen.seconds is not None, "no ranks are compared without it"
    return Stragglers(
        Detector(chosen.slower, chosen.seconds), logger, partial(note_stragglers, run_dir)
    )


def make_hooks(job: Job, settings: RunSettings, run_dir: Path) -> list[Hook]:
    """Return the hooks that draw pictures, try the metrics and upload checkpoints."""
    hooks: list[Hook] = [Pictures()]
    if job.metrics is not None:
        from ddp_lab.training.metrics_trial import MetricsTrial

        hooks.append(MetricsTrial(job.metrics))
    if settings.checkpoint.mirror and job.runtime.is_main:
        from ddp_lab.checkpoints.mirror import Mirror

        # The watchdog ends a launch after this timeout.
        hooks.append(Mirror(settings.checkpoint.mirror, run_dir, settings.timeout / 2))
    return hooks


def profiled(
    hooks: list[Hook], job: Job, run_dir: Path, logger: Logger, is_built: bool
) -> list[Hook]:
    """Return the hooks between those of the profiler, which measures the time of all others.

    Args:
        hooks: of the run.
        job: the run.
        run_dir: its directory.
        logger: of the run.
        is_built: whether the step is captured or compiled.
    """
    from ddp_lab.training.profiler import Profiled

    profiler = Profiled(job.runtime, logger, run_dir / "profile", is_built, job.strategy.bubble)
    return [profiler, *hooks, profiler.loading]


def callbacks_of(job: Job, run_dir: Path) -> "Sequence[Callback]":
    """Return the user's hooks, which may write to the run directory."""
    for callback in job.callbacks:
        callback.use_folder(run_dir)
    return job.callbacks


def record_settings(run_dir: Path, settings: RunSettings, ranks: int) -> None:
    """Write the config to the run directory, and log what a resume changes in it."""
    if settings.source is None and not (run_dir / CONFIG).exists():
        write_config(run_dir, settings.config, ranks)
        return
    from ddp_lab.launchers.config_changes import record_config

    resumed = None if settings.source is None else run_of(settings.source)
    for line in record_config(run_dir, settings.config, ranks, resumed):
        log.info(line)


def open_energy(job: Job, progress: Progress) -> "EnergyMeter | None":
    """Return what reads the energy of the GPUs; None where there are none with counters.

    Collective on GPUs.
    """
    if job.strategy.device.type != "cuda":
        return None
    from ddp_lab.training.energy import open_meter

    return open_meter(job.runtime, job.strategy.devices, progress.joules)


def make_step(job: Job, trainer: Trainer, progress: Progress) -> TrainStep:
    """Return the step to train with: in eager mode, or compiled and captured by the job's options.

    Collective.
    """
    if job.options.is_plain:
        job.options.log_choices()
        return trainer.eager_step

    from ddp_lab.run.speed import make_fast_step

    return make_fast_step(job, trainer, progress)


def fit_and_close(run: Run, guard: Guard) -> Outcome:
    """Train until the end, a request to stop, or an error that ends the training.

    Return how it has ended.
    """
    try:
        try:
            fit(run)
            status = "finished"
        except Preempted:
            status = "interrupted" if guard.interrupted else "preempted"
        close_all(run.hooks, status)
    except TrainingError:
        # the last valid checkpoint may still be in the writer thread, or not uploaded
        close_all(run.hooks, "failed")
        raise
    return status


def log_result(
    job: Job, run_dir: RunDir, progress: Progress, checkpoints: Checkpoints
) -> dict[str, Any]:
    """Log and return the epoch whose weights are the result, its metrics, and the checkpoint.

    Args:
        job: of the run.
        run_dir: of the run.
        progress: at the end of the run.
        checkpoints: of the run.
    """
    if chosen := result_in(checkpoints.folder, checkpoints.best):
        path, best = chosen
        end = best
        criterion = checkpoints.best
    else:
        path = (steps_in(checkpoints.folder) or [checkpoints.folder])[-1]
        end = progress
        criterion = None
    epoch = end.evaluated_epoch

    metrics = run_dir.path / "metrics.jsonl"
    values = [row[checkpoints.best] for row in read_evaluations(metrics) if checkpoints.best in row]
    if values and not any(value is not None for value in values):
        never = f"{checkpoints.best} was not finite in any epoch"
        log.info(f"{never}, so that none is the best: the last weights are the result")
    log.info(describe_result(metrics, epoch, end.step, criterion, path, job.strategy.where))
    row = row_at(metrics, epoch, end.step)
    result = {"epoch": epoch, "checkpoint": str(path)} | {
        key: row[key] for key in row if key.partition("_")[0] in SETS
    }
    note(result=result)
    return result


def open_logger(job: Job, settings: RunSettings, run_dir: Path, progress: Progress) -> FileLogger:
    """Return the logger of rank 0."""
    sizes = job.sizes
    start = progress.epoch, progress.step
    trackers = None
    if settings.trackers:
        from ddp_lab.observe.trackers.background import Trackers
        from ddp_lab.observe.trackers.base import TrackedRun

        run = TrackedRun(run_dir, "", {**settings.tracked}, {**settings.hparams}, start)
        trackers = Trackers(settings.trackers, run, patience=settings.timeout / 4)

    return FileLogger(
        run_dir,
        start=start,
        constants={
            "global_batch_size": sizes.global_batch_size,
            "world_size": sizes.world_size,
            "strategy": job.strategy.name,
        },
        trackers=trackers,
        classes=job.dataset.classes,
        evaluated_at=progress.evaluated_at,
    )
