"""The base of the sweep launchers: the jobs of a sweep, each with its own run directory in the sweep's directory."""

import csv
import hashlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.command_line import leaves, quote
from ddp_lab.observe.metrics_file import objective, row_of
from ddp_lab.observe.plot import Curve, beside, curves
from ddp_lab.resilience.run_directory import read_json

LONGEST = 120  # maximum number of characters of a job's name, without the hash
# The keys that may change when a sweep is resumed.
MAY_CHANGE = {"name", "runs_dir", "resume", "epochs", "timeout", "checkpoint", "inject", "evaluate_test", "optimize"}


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    Attributes:
        name: Name of its run directory: the overrides that the sweep chose.
        overrides: Command-line arguments of the job: Hydra overrides, after the option --config-dir of the sweep, if any.
        run_dir: Its run directory, as this machine sees it.
        epochs: Number of epochs after which it is finished.
        optimize: The metric that the sweeper gets.
        lower_is_better: Whether low values of it are good ones.
        one_process: Whether its strategy drives all devices from one process.
    """

    name: str
    overrides: list[str]
    run_dir: Path
    epochs: int
    optimize: str
    one_process: bool
    lower_is_better: bool = False

    def result(self) -> tuple[str, float | None]:
        """Return name and value of the metric `optimize`, as from `objective`."""
        return objective(self.run_dir / "metrics.jsonl", self.optimize, self.lower_is_better)


class SweepLauncher(Launcher):
    """A Hydra launcher whose jobs are launches of their own.

    Attributes:
        waits: Whether `launch` returns when the jobs have ended, which a sweeper that searches needs.
    """

    waits = True

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store Hydra's objects and create the sweep's directory.

        Raises:
            ConfigError: The directory cannot be created or is not writable, or a search could not learn from its jobs.
        """
        self.config, self.hydra_context = config, hydra_context
        self.searches = "direction" in config.hydra.get("sweeper", {})  # Optuna's sweeper
        if self.searches:
            check_search(config, self.waits)
        try:  # Hydra writes there next, and would fail with a traceback
            self.sweep_dir.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.sweep_dir).close()
        except OSError as error:
            raise ConfigError(
                f"hydra.sweep.dir={self.sweep_dir}: cannot write to it ({error.strerror}); use another directory"
            ) from None

    @property
    def sweep_dir(self) -> Path:
        return Path(self.config.hydra.sweep.dir).resolve()

    def jobs(self, job_overrides: Sequence[Sequence[str]]) -> list[Job]:
        """Return the jobs of the sweep.

        Args:
            job_overrides: The Hydra overrides of each job.

        Raises:
            ConfigError: A job's run directory contains a run with another config.
        """
        jobs: list[Job] = []
        own_keys = ("name", "runs_dir")  # set below for each job
        given = [[o for o in filter_overrides(job) if o.partition("=")[0] not in own_keys] for job in job_overrides]
        chosen = self._chosen_keys()
        for overrides, all_overrides in zip(given, job_overrides, strict=True):
            cfg = self.hydra_context.config_loader.load_sweep_config(self.config, list(all_overrides))
            name = directory_name([o for o in overrides if o.partition("=")[0] in chosen] or overrides)
            refuse_another(self.sweep_dir / name, cfg)
            overrides += [f"runs_dir={quote(str(self.sweep_dir))}", f"name={quote(name)}"]
            one_process = get_object(cfg.strategy["_target_"]).one_process
            lower = lower_is_better(cfg)
            run_dir, arguments = self.sweep_dir / name, self._config_dir() + overrides
            jobs.append(Job(name, arguments, run_dir, cfg.epochs, cfg.optimize, one_process, lower))
        return jobs

    def _chosen_keys(self) -> set[str]:
        """Return the keys whose values the sweep chooses: those that have several, here or in the sweeper's config."""
        given = OverridesParser.create().parse_overrides(list(self.config.hydra.overrides.task))
        return {each.get_key_element() for each in given if each.is_sweep_override()} | set(
            self.config.hydra.sweeper.params or ()
        )

    def _config_dir(self) -> list[str]:
        """Return the option --config-dir with which the sweep was started; nothing if it has none."""
        sources = self.config.hydra.runtime.config_sources
        folders = [source.path for source in sources if source.provider == "command-line"]
        return ["--config-dir", *folders] if folders else []


def refuse_another(run_dir: Path, cfg: DictConfig) -> None:
    """Check that a run directory does not belong to another sweep.

    Two sweeps can have jobs of the same name, because a name omits the overrides that a sweep does not choose.

    Args:
        run_dir: The run directory.
        cfg: The composed config of the job.

    Raises:
        ConfigError: The directory contains a run with another config.
    """
    if not (run_dir / "config.yaml").exists():
        return
    recorded = cast("DictConfig", OmegaConf.load(run_dir / "config.yaml"))
    there, here = (dict(leaves(OmegaConf.to_container(each, resolve=True))) for each in (recorded, cfg))
    fixed = set(map(str, recorded)) - MAY_CHANGE
    changed = [key for key in there | here if key.partition(".")[0] in fixed and there.get(key) != here.get(key)]
    if changed:
        raise ConfigError(
            f"hydra.sweep.dir={run_dir.parent}: {run_dir.name} was started there with another {changed[0]} "
            f"({there.get(changed[0])}, now {here.get(changed[0])}); use another directory"
        )


def lower_is_better(cfg: DictConfig) -> bool:
    """Return whether low values of the metric `optimize` are good ones, according to the task."""
    return get_object(cfg.task["_target_"]).lower_is_better(cfg.optimize.partition("_")[2])


def directory_name(overrides: Sequence[str]) -> str:
    """Return the overrides as the name of a directory, with a hash if characters had to be replaced or dropped."""
    plain = ",".join(overrides)
    name = re.sub(r"[^\w.=,+-]", "-", plain).lstrip(".") or "job"
    if name != plain or len(name) > LONGEST:
        name = f"{name[:LONGEST]}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"
    return name


def check_search(config: DictConfig, waits: bool) -> None:
    """Check that a sweeper that searches learns from the validation set, and proposes the same jobs when it is started again.

    Args:
        config: The composed config, with Hydra's.
        waits: As in `SweepLauncher`.

    Raises:
        ConfigError: It does not.
    """
    sweeper, optimize = config.hydra.sweeper, config.optimize
    direction = getattr(sweeper.direction, "name", sweeper.direction)
    best = "minimize" if lower_is_better(config) else "maximize"
    if not waits:
        raise ConfigError(
            "hydra/sweeper=optuna: learns from the results of its jobs, which this launcher does not wait for. Use "
            "hydra/launcher=torchrun"
        )
    for key in ("n_trials", "n_jobs"):
        if sweeper[key] < 1:
            raise ConfigError(f"hydra.sweeper.{key}={sweeper[key]}: must be an integer of at least 1")
    if not optimize.startswith("val_"):
        raise ConfigError(
            f"optimize={optimize}: hydra/sweeper=optuna must choose by the validation set. "
            "Use optimize=val_accuracy or another val_*, and data.val_fraction=0.1 if the data have no validation set"
        )
    if direction != best:
        raise ConfigError(f"hydra.sweeper.direction={direction}: must be {best} for optimize={optimize}")
    if "seed" in sweeper.sampler and sweeper.sampler.seed is None:
        raise ConfigError(
            "hydra.sweeper.sampler.seed=null: a search that is started again would propose other jobs; use a number"
        )


def is_finished(job: Job) -> bool:
    """Return whether a job has trained for all its epochs, or until early stopping.

    Raises:
        ConfigError: It has, but its metrics.jsonl lacks the last epoch, so that its result is unknown.
    """
    status, config = read_json(job.run_dir / "status.json"), job.run_dir / "config.yaml"
    stopped = status is not None and config.exists() and status["epoch"] < OmegaConf.load(config).epochs
    if status is None or status["status"] != "finished" or not (status["epoch"] >= job.epochs or stopped):
        return False
    if not row_of(metrics := job.run_dir / "metrics.jsonl", status["epoch"]):
        raise ConfigError(
            f"{metrics}: lacks epoch {status['epoch']} of a finished run, so the sweep does not know its result. Delete "
            f"{job.run_dir} to train this job again"
        )
    return True


def job_return(job: Job, failed: bool = False) -> JobReturn:
    """Return the result that Hydra expects of every job, with the metric for its sweeper; None if it failed or did not run."""
    made = JobReturn(overrides=list(job.overrides), status=JobStatus.COMPLETED)
    made.return_value = None if failed else job.result()[1]
    return made


def write_results(folder: Path, jobs: Sequence[Job]) -> list[str]:
    """Write results.csv and results.png: the metric `optimize` of each job. Return a line about the best job.

    Nothing is written or returned before a job has a result on the validation set: the test set chooses nothing.
    """
    results = [(job, *job.result()) for job in jobs]
    scores = {n: (metric, value) for n, (_, metric, value) in enumerate(results, 1) if metric.startswith("val_")}
    points = [(float(number), value) for number, (_, value) in scores.items() if value is not None]
    if not points:
        return []
    with (folder / "results.csv").open("w", newline="") as file:
        rows = ((job.name, (read_json(job.run_dir / "status.json") or {}).get("status"), *found) for job, *found in results)
        csv.writer(file).writerows([("job", "status", "metric", "value"), *rows])
    metric = next(iter(scores.values()))[0]
    choose = min if jobs[0].lower_is_better or metric == "val_loss" else max
    best = [(number, choose(value for _, value in points[:i])) for i, (number, _) in enumerate(points, 1)]
    name, label = next(job.name for job, _, value in results if value == best[-1][1]), metric.replace("_", " ")
    lines = [Curve("best so far", best), Curve("job", points)]
    beside([curves(folder.name, "job", label, lines)], folder / "results.png")
    return [f"best of {len(jobs)}: {name}, {label} {best[-1][1]:.4f} ({folder / 'results.csv'})"]
