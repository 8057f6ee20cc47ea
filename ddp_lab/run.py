"""One run: what a checked config becomes. Every mistake of the user is raised before the process group is opened."""

from functools import partial
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ddp_lab.config.errors import TrainingError
from ddp_lab.config.schema import build
from ddp_lab.data.datasets import Dataset
from ddp_lab.data.loaders import LOADERS
from ddp_lab.data.sharding import Loader
from ddp_lab.launch.preflight import check_network, check_storage, warn
from ddp_lab.observe.logger import FileLogger, Logger, log, setup_logging
from ddp_lab.observe.profiler import NEEDED, Profiled, check_profile
from ddp_lab.resilience.checkpoint import Checkpoints
from ddp_lab.resilience.checkpoint_files import load_checkpoint
from ddp_lab.resilience.decisions import Decisions
from ddp_lab.resilience.fault_injection import Fault
from ddp_lab.resilience.guard import Guard, GuardSettings, Preempted
from ddp_lab.resilience.run_directory import RunDir
from ddp_lab.resilience.watchdog import Watch
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.loop import fit, is_over
from ddp_lab.training.plan import Plan
from ddp_lab.training.schedule import make_scheduler
from ddp_lab.training.speed.options import Levers
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime


def train(cfg: DictConfig, runtime: Runtime) -> str:
    findings = check_network(runtime)
    strategy = build(cfg.strategy, runtime)
    source = build(cfg.data.dataset)
    runtime.agree("dataset", source.prepare, per_node=True)
    dataset = source.load()
    plan = Plan.make(cfg, runtime.world_size, strategy.replicas, len(dataset.train.targets))
    if cfg.profile:
        check_profile(cfg.epochs * plan.steps_per_epoch, strategy.device)

    torch.manual_seed(cfg.seed)
    model = build(cfg.model, **dataset.model_shape())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    strategy.partition(model, plan.samples_at_once)
    loaders = make_loaders(cfg, dataset, strategy, plan)
    findings += check_storage(cfg, runtime, model)
    if cfg.resume not in ("auto", "never"):
        runtime.agree("resume", lambda: load_checkpoint(cfg.resume, shapes) and None)  # before a run directory is made

    choices = HydraConfig.get().runtime.choices
    run_dir = RunDir(cfg, runtime, f"{choices.model}-{choices.data}-{choices.strategy}")
    setup_logging(run_dir.path, runtime.rank)
    warn(findings, runtime)
    log.info(f"{run_dir.path}: {choices.model} on {choices.data}, {cfg.precision}")
    log.info(plan)
    levers = Levers.choose(cfg, strategy)
    if run_dir.failure and runtime.rank == 0:
        log.warning(f"started again after {run_dir.failure}")

    decisions = Decisions(runtime)
    decisions.listen()
    with Watch(run_dir, runtime, cfg.timeout) as watch:
        if not strategy.one_process:
            runtime.open_group()
        strategy.setup(levers.shape(model, runtime))
        log.info(strategy.describe())
        optimizer = levers.settle(build(cfg.optimizer)(strategy.param_groups(), lr=plan.lr))
        warmup_steps = round(cfg.warmup_epochs * plan.steps_per_epoch)
        scheduler = make_scheduler(optimizer, build(cfg.scheduler), cfg.epochs * plan.steps_per_epoch, warmup_steps)

        folder = run_dir.path / "checkpoints"
        checkpoints = Checkpoints(folder, runtime, strategy, optimizer, scheduler, shapes, cfg.seed, cfg.checkpoint.keep)
        progress = checkpoints.resume("auto" if run_dir.restarted and checkpoints.files() else cfg.resume, plan.steps_before)
        if is_over(progress, cfg.epochs, cfg.patience):
            log.info(
                f"nothing to do: {progress.epoch - 1} of epochs={cfg.epochs} are done; raise epochs to go on, "
                "or choose another name"
            )
            return watch.end("finished", progress)

        logger = open_logger(cfg, run_dir.path, progress.epoch, dataset, strategy, plan) if runtime.rank == 0 else Logger()
        step = Step(strategy, optimizer, scheduler, cfg.accumulate, cfg.max_grad_norm, cfg.on_nan == "skip")
        watch.at("compiling")
        step = levers.build(step, loaders[0])
        if cfg.inject:
            step = Fault(step, cfg.inject, runtime.rank, run_dir.path, checkpoints, progress.step)
        left = cfg.epochs * plan.steps_per_epoch - plan.steps_before(progress)
        profiling = cfg.profile and left >= NEEDED
        if cfg.profile and not profiling:
            log.info(f"profile=true: left off, because {left} steps are left and it needs {NEEDED}")
        if profiling:
            step = Profiled(step, runtime, logger, run_dir.path / "profile", levers.cuda_graph, strategy.bubble())
        every = cfg.checkpoint
        settings = GuardSettings(every.every_epochs, every.every_steps, every.on_error, cfg.on_nan, cfg.check_replicas)
        guard = Guard(settings, strategy, checkpoints, decisions, watch, progress, step.tally)
        try:
            fit(strategy, step, *loaders, logger, guard, progress, cfg.epochs, cfg.patience)
            status = "finished"
        except Preempted:
            status = "preempted"
        except TrainingError:
            checkpoints.wait()  # the last good one may still be on its way
            raise
        finally:
            if profiling:
                step.end()
        logger.close()
        guard.finish()
        return watch.end(status, guard.progress if status == "finished" else checkpoints.kept)


def make_loaders(cfg: DictConfig, dataset: Dataset, strategy: Strategy, plan: Plan) -> tuple[Loader, Loader]:
    make = partial(
        LOADERS[cfg.data.loader],
        batch_size=plan.global_batch_size,
        num_workers=cfg.data.num_workers,
        dp_rank=strategy.dp_rank,
        dp_size=strategy.dp_size,
        device=strategy.device,
        mean=cfg.data.mean,
        std=cfg.data.std,
        seed=cfg.seed,
    )
    training = make(dataset.train, shuffle=True, shift=cfg.data.shift, flip=cfg.data.flip)
    return training, make(dataset.test, shuffle=False)


def open_logger(
    cfg: DictConfig, run_dir: Path, start_epoch: int, dataset: Dataset, strategy: Strategy, plan: Plan
) -> FileLogger:
    choices = HydraConfig.get().runtime.choices
    config = OmegaConf.to_yaml(cfg, resolve=True)
    (run_dir / "config.yaml").write_text(config)
    return FileLogger(
        run_dir,
        start_epoch=start_epoch,
        steps_per_epoch=plan.steps_per_epoch,
        constants={
            "global_batch_size": plan.global_batch_size,
            "world_size": plan.world_size,
            "strategy": strategy.name,
        },
        config=config,
        hparams={group: choices[group] for group in ("data", "model", "strategy", "optimizer", "scheduler")}
        | {key: cfg[key] for key in ("epochs", "precision", "seed")}
        | {"lr": plan.lr, "global_batch_size": plan.global_batch_size, "devices": strategy.num_devices},
        classes=dataset.classes,
        where=strategy.where,
    )
