"""What surrounds the training of a run, from its config: RunSettings, and whether they fit.

A run is recorded somewhere, resumes from something, chooses its best checkpoint by a metric, and
may begin or not. What can be refused is refused here, before its directory is created.
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ddp_lab.checkpoints.find import find_checkpoint, find_source, open_checkpoint, run_of
from ddp_lab.config.build import chosen_trackers, plain
from ddp_lab.config.compose import CONF
from ddp_lab.config.errors import ConfigError, is_or_are
from ddp_lab.config.schema import StragglerConfig
from ddp_lab.config.types import LIMITS
from ddp_lab.data.dataset import Dataset
from ddp_lab.launchers.recorded_config import to_record, without_secrets
from ddp_lab.resilience.run_directory import find_launch
from ddp_lab.run.data_record import compare_data
from ddp_lab.run.job import CheckpointSettings, Job, RunSettings
from ddp_lab.training.progress import Criterion
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:
    from ddp_lab.launchers.preflight import Finding

GROUPS = ("data", "model", "strategy", "optimizer", "scheduler")  # that distinguish runs in a table
# By the set that a metric needs: how it is called, and what to use without it.
NEEDED = {
    "val": ("validation", "data.val_fraction=0.1, or with data=folder a folder val/"),
    "test": ("test", "val_loss, or add a test set"),
}
# the keys by which a run chooses
SELECTING = ("checkpoint.best", "optimize", "patience")


def find_resumed(cfg: DictConfig, runtime: Runtime) -> Path | None:
    """Return what the run resumes from, as from `find_source`.

    A mirror first restores what this disk has lost. Collective.

    Raises:
        ConfigError: the mirror cannot be read.
    """
    runs_dir = Path(cfg.runs_dir)
    if cfg.checkpoint.mirror:
        restore_lost(cfg, runtime)
    launch = runtime.launch

    def find() -> str | None:
        restarted = find_launch(runs_dir, launch) if runtime.under_torchrun else None
        source = find_source(runs_dir, cfg.name, cfg.resume, restarted)
        return None if source is None else str(source)

    source = runtime.broadcast_from_rank0("source", find)
    return None if source is None else Path(source)


def restore_lost(cfg: DictConfig, runtime: Runtime) -> None:
    """Download the checkpoints of a named run that this disk has not from its mirror. Collective.

    Raises:
        ConfigError: as `Mirror.begin`.
    """
    from ddp_lab.checkpoints.mirror import Mirror

    def restore() -> None:
        copies = Mirror(cfg.checkpoint.mirror, Path(cfg.runs_dir) / (cfg.name or "unnamed"))
        if cfg.name:
            copies.begin(cfg.resume)

    runtime.broadcast_from_rank0("mirror", restore)


def model_label(choice: str, node: Mapping[str, Any]) -> str:
    """Return what a run calls its model, in a form that a directory can have.

    It is the key model.name, such as convnext_tiny of model=timm; with model=own the name of the
    class or function; else the option of the group.

    Args:
        choice: The option of the group model.
        node: The config group model.
    """
    name = node.get("name")
    if choice == "own":
        name = node["_target_"].rpartition(".")[2]
    if not isinstance(name, str):
        return choice
    last = name.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.-]", "-", last).strip(".-") or choice


def make_settings(
    cfg: DictConfig, job: Job, source: Path | None, findings: "list[Finding]"
) -> RunSettings:
    """Return where the run is recorded, and what protects it."""
    if HydraConfig.initialized():
        choices = HydraConfig.get().runtime.choices
    else:
        choices = dict.fromkeys(GROUPS, "")
    config = plain(cfg)
    model = model_label(choices["model"], config["model"])
    hparams = (
        {group: choices[group] for group in GROUPS}
        | {"model": model}
        | {
            key: cfg[key]
            for key in ("epochs", *LIMITS, "precision", "seed")
            if cfg.get(key) is not None
        }
    )
    sizes = job.sizes
    hparams |= {
        "lr": sizes.lr,
        "global_batch_size": sizes.global_batch_size,
        "devices": job.strategy.num_devices,
    }

    keys = ("every_epochs", "every_steps", "keep", "on_error", "format", "mirror")
    checkpoint = {key: cfg.checkpoint[key] for key in keys}
    protection = {
        key: cfg[key]
        for key in ("name", "resume", "on_nan", "check_replicas", "inject", "profile", "timeout")
    }
    return RunSettings(
        runs_dir=Path(cfg.runs_dir),
        label=f"{model}-{choices['data']}-{choices['strategy']}",
        title=f"{model} on {choices['data']}, {cfg.precision}",
        source=source,
        findings=findings,
        checkpoint=CheckpointSettings(
            **checkpoint,
            every_minutes=cfg.checkpoint.get("every_minutes"),
            at_steps=list(cfg.checkpoint.at_steps),
            best=criterion(cfg, job.dataset),
        ),
        straggler=StragglerConfig(**config.get("straggler", {})),
        float32_matmul=cfg.float32_matmul,
        config=to_record(cfg),
        tracked=without_secrets(config),
        hparams=hparams,
        trackers=chosen_trackers(config["tracker"], config["tracker_options"]),
        **protection,
    )


def left_out(cfg: DictConfig) -> list[str]:
    """Return a line about the options of the optimizer in conf/ that this run's class lacks.

    It is empty if there are none.
    """
    if not HydraConfig.initialized():
        return []
    chosen = HydraConfig.get().runtime.choices["optimizer"]
    path = CONF / "optimizer" / f"{chosen}.yaml"
    defaults = OmegaConf.load(path) if path.is_file() else {}
    names = [str(name) for name in defaults if name not in cfg.optimizer and name != "fused"]
    if not names:
        return []
    return [
        f"optimizer._target_={cfg.optimizer['_target_']}: {', '.join(names)} of optimizer={chosen} "
        f"{is_or_are(len(names))} left out"
    ]


def criterion(cfg: DictConfig, dataset: Dataset) -> Criterion | None:
    """Return the metric of the validation set that chooses the best checkpoint.

    With None the last weights are the result.
    """
    best = cfg.checkpoint.best
    if best != "auto":
        return best
    return None if dataset.val is None else "val_loss"


def check_selection(cfg: DictConfig, job: Job, by_metric: str | None = None) -> None:
    """Check that the sets and metrics exist by which a run chooses.

    It chooses the best checkpoint, the result of a sweep, the last epoch, and its learning rate.

    Args:
        cfg: the config.
        job: the run.
        by_metric: the metric on which the learning-rate schedule depends; None: on none.

    Raises:
        ConfigError: one does not.
    """
    dataset = job.dataset
    task = job.task
    has_validation = dataset.val is not None
    if cfg.get("evaluate_every") and not has_validation and cfg.evaluate_test == "end":
        raise ConfigError(
            f"evaluate_every={cfg.evaluate_every}: there is no validation set, and "
            "evaluate_test=end evaluates the test set after the last epoch only. Use "
            "data.val_fraction, or evaluate_test=every_epoch"
        )
    values = {key: OmegaConf.select(cfg, key) for key in SELECTING}
    if by_metric is not None:
        values["scheduler.metric"] = by_metric
    for key, value in values.items():
        name, _, metric = str(value).partition("_")
        if key == "patience" and value:
            name = "val"
            metric = ""
        known = task.monitorable(len(dataset.classes))
        if job.metrics is not None:
            job.metrics.require_direction(metric, f"{key}={value}")
            known += job.metrics.metrics
        if metric and metric not in known:
            raise ConfigError(
                f"{key}={value}: {type(task).__name__} has no such metric for these data; allowed: "
                f"{', '.join(f'{name}_{each}' for each in known)}. A task of your own names others "
                "in its attribute `metric_mode`"
            )

        if name in NEEDED and name not in dataset.sets:
            set_name, remedy = NEEDED[name]
            raise ConfigError(
                f"{key}={value}: needs a {set_name} set, which these data do not have. Use {remedy}"
            )


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
