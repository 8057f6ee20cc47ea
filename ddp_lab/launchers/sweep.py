"""The jobs of a sweep, each with its own run directory in the sweep's, and their results."""

import csv
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra.core.utils import JobReturn, JobStatus
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from ddp_lab.config.build import leaves, plain
from ddp_lab.config.errors import ConfigError
from ddp_lab.config.types import LIMITS
from ddp_lab.observe.metrics_file import objective, read_epochs, row_of
from ddp_lab.observe.plot import Curve, Plot, beside, curves, dots
from ddp_lab.resilience.run_directory import read_json

LONGEST = 120  # maximum number of characters of a job's name, without the hash
# The keys that may change when a sweep is resumed.
MAY_CHANGE = {
    "name",
    "runs_dir",
    "resume",
    "epochs",
    *LIMITS,
    "timeout",
    "checkpoint",
    "inject",
    "evaluate_test",
    "optimize",
}


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    Attributes:
        name: Name of its run directory: the overrides that the sweep chose.
        overrides: Command-line arguments of the job: Hydra overrides, after the option --config-dir
            of the sweep, if any.
        run_dir: Its run directory, as this machine sees it.
        limits: What ends it: the values of the keys epochs, max_steps, max_tokens and max_minutes.
        optimize: The metric that the sweeper gets.
        lower_is_better: Whether low values of it are good ones.
        one_process: Whether its strategy drives all devices from one process.
    """

    name: str
    overrides: list[str]
    run_dir: Path
    limits: Mapping[str, Any]
    optimize: str
    one_process: bool
    lower_is_better: bool = False

    def result(self) -> tuple[str, float | None]:
        """Return name and value of the metric `optimize`, as from `objective`."""
        return objective(self.run_dir / "metrics.jsonl", self.optimize, self.lower_is_better)


def refuse_another(run_dir: Path, cfg: DictConfig) -> None:
    """Check that a run directory does not belong to another sweep.

    Two sweeps can have jobs of the same name, because a name omits the overrides that a sweep does
    not choose.

    Args:
        run_dir: The run directory.
        cfg: The composed config of the job.

    Raises:
        ConfigError: The directory contains a run with another config.
    """
    if not (run_dir / "config.yaml").exists():
        return
    recorded = cast("DictConfig", OmegaConf.load(run_dir / "config.yaml"))
    there, here = (dict(leaves(plain(each))) for each in (recorded, cfg))
    fixed = set(map(str, recorded)) - MAY_CHANGE
    changed = [
        key
        for key in there | here
        if key.partition(".")[0] in fixed and there.get(key) != here.get(key)
    ]
    if changed:
        raise ConfigError(
            f"hydra.sweep.dir={run_dir.parent}: {run_dir.name} was started there with another "
            f"{changed[0]} ({there.get(changed[0])}, now {here.get(changed[0])}); use another "
            "directory"
        )


def lower_is_better(cfg: DictConfig) -> bool:
    """Return whether low values of the metric `optimize` are good ones.

    The task says so, or the metric of the key `metrics`.
    """
    from ddp_lab.training.hooks import lower_is_better as is_lower_better

    metric = cfg.optimize.partition("_")[2]
    further = None
    if cfg.get("metrics"):
        from ddp_lab.training.gathered_metrics import make_metrics

        further = make_metrics(plain(cfg)["metrics"])
    return is_lower_better(metric, get_object(cfg.task["_target_"]), further)


def directory_name(overrides: Sequence[str]) -> str:
    """Return the overrides as the name of a directory, with a hash if characters were replaced."""
    plain = ",".join(overrides)
    name = re.sub(r"[^\w.=,+-]", "-", plain).lstrip(".") or "job"
    if name != plain or len(name) > LONGEST:
        name = f"{name[:LONGEST]}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"
    return name


def check_search(config: DictConfig) -> None:
    """Check that a sweeper that searches learns from the validation set.

    It must also propose the same jobs when it is started again.

    Args:
        config: The composed config, with Hydra's.

    Raises:
        ConfigError: It does not.
    """
    sweeper = config.hydra.sweeper
    optimize = config.optimize
    direction = getattr(sweeper.direction, "name", sweeper.direction)
    best = "minimize" if lower_is_better(config) else "maximize"
    for key in ("n_trials", "n_jobs"):
        if sweeper[key] < 1:
            raise ConfigError(
                f"hydra.sweeper.{key}={sweeper[key]}: must be an integer of at least 1"
            )

    if not optimize.startswith("val_"):
        raise ConfigError(
            f"optimize={optimize}: hydra/sweeper=optuna must choose by the validation set. Use "
            "optimize=val_accuracy or another val_*, and data.val_fraction=0.1 if the data have "
            "no validation set"
        )

    if direction != best:
        raise ConfigError(
            f"hydra.sweeper.direction={direction}: must be {best} for optimize={optimize}"
        )
    if "seed" in sweeper.sampler and sweeper.sampler.seed is None:
        raise ConfigError(
            "hydra.sweeper.sampler.seed=null: a search that is started again would propose other "
            "jobs; use a number"
        )


def is_finished(job: Job) -> bool:
    """Return whether a job has trained until one of its limits, or until early stopping.

    Raises:
        ConfigError: It has, but its metrics.jsonl lacks the last epoch, so that its result is
            unknown.
    """
    status = read_json(job.run_dir / "status.json")
    config = job.run_dir / "config.yaml"
    if status is None or status["status"] != "finished" or not config.exists():
        return False
    recorded = cast("DictConfig", OmegaConf.load(config))
    unchanged = all(recorded.get(key) == value for key, value in job.limits.items())
    epochs = job.limits["epochs"]
    has_all_epochs = epochs is not None and status["epoch"] >= epochs
    has_other_limits = any(recorded.get(key) is not None for key in LIMITS)
    stopped = not has_other_limits and status["epoch"] < recorded.epochs
    if not (unchanged or has_all_epochs or stopped):
        return False

    metrics = job.run_dir / "metrics.jsonl"
    if not row_of(metrics, status["epoch"]):
        raise ConfigError(
            f"{metrics}: lacks epoch {status['epoch']} of a finished run, so the sweep does not "
            f"know its result. Delete {job.run_dir} to train this job again"
        )
    return True


def job_return(job: Job, failed: bool = False) -> JobReturn:
    """Return the result that Hydra expects of every job, with the metric for its sweeper.

    The metric is None if the job failed or did not run.
    """
    job_result = JobReturn(overrides=list(job.overrides), status=JobStatus.COMPLETED)
    job_result.return_value = None if failed else job.result()[1]
    return job_result


def write_results(folder: Path, jobs: Sequence[Job]) -> list[str]:
    """Write results.csv, the metric `optimize` of each job, and results.png.

    Return a line about the best job, or about the file.

    The picture and the best job are those of the validation set: the test set chooses nothing.
    """
    results = [(job, *job.result()) for job in jobs]
    if all(value is None for *_, value in results):
        return []

    with (folder / "results.csv").open("w", newline="") as file:
        rows = (
            (job.name, (read_json(job.run_dir / "status.json") or {}).get("status"), *cells)
            for job, *cells in results
        )
        csv.writer(file).writerows([("job", "status", "metric", "value"), *rows])

    scores = {
        n: (metric, value)
        for n, (_, metric, value) in enumerate(results, 1)
        if metric.startswith("val_")
    }
    points = [(float(number), value) for number, (_, value) in scores.items() if value is not None]
    if not points:
        return [f"results: {folder / 'results.csv'}"]

    metric = next(iter(scores.values()))[0]
    choose = min if jobs[0].lower_is_better or metric == "val_loss" else max
    best = [
        (number, choose(value for _, value in points[:i]))
        for i, (number, _) in enumerate(points, 1)
    ]
    name = next(job.name for job, _, value in results if value == best[-1][1])
    label = metric.replace("_", " ")
    lines = [Curve("best so far", best), Curve("job", points)]
    scored = {
        job.name: value
        for job, metric, value in results
        if value is not None and metric.startswith("val_")
    }
    wide = "y" if spans_decades([value for _, value in points]) else ""
    in_order = curves("in order", "job", label, lines, log=wide)
    plots = [by_swept(folder.name, label, scored), in_order]
    beside(plots, folder / "results.png")
    return [f"best of {len(jobs)}: {name}, {label} {best[-1][1]:.4f} ({folder / 'results.csv'})"]


def by_swept(title: str, label: str, values: Mapping[str, float]) -> Plot:
    """Return a plot of a metric by what a sweep has chosen.

    It is a curve over the values of one key that are numbers, on a logarithmic axis if they span a
    decade or more; else each job is a row.

    Args:
        title: Of the plot.
        label: Name of the metric.
        values: The metric of each job, by the name of its directory, such as optimizer.lr=0.1.
    """
    chosen = [name.split(",") for name in values]
    key = chosen[0][0].partition("=")[0]
    numbers = [number_of(parts[0].partition("=")[2]) for parts in chosen]
    is_one_key = all(len(parts) == 1 and parts[0].startswith(f"{key}=") for parts in chosen)
    xs = [number for number in numbers if number is not None]
    if is_one_key and len(xs) == len(numbers) > 1:
        points = sorted(zip(xs, values.values(), strict=True))
        log_x = spans_decades(xs)
        log_y = spans_decades(list(values.values()))
        log = {(1, 1): "xy", (1, 0): "x", (0, 1): "y"}.get((log_x, log_y), "")
        return curves(title, key, label, [Curve("job", points)], log=cast("Any", log))

    shortened = {
        ", ".join(map(_short, parts)): value
        for parts, value in zip(chosen, values.values(), strict=True)
    }
    if len(shortened) < len(values):
        shortened = dict(values)
    return dots(title, label, shortened)


def _short(part: str) -> str:
    """Return key=value without the groups of the key: lr=0.1 of optimizer.lr=0.1."""
    key, _, value = part.partition("=")
    return f"{key.rpartition('.')[2]}={value}"


def spans_decades(values: Sequence[float]) -> bool:
    """Return whether values are above 0 and differ by a factor of 10 or more."""
    return min(values) > 0 and max(values) >= 10 * min(values)


def number_of(text: str) -> float | None:
    """Return a number that a text is, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def reason_of(message: str) -> str:
    """Return the message of a failure in one line: without the lines of a traceback, if it has one.

    Those are indented; the exception itself is not.
    """
    first, *others = message.splitlines()
    if not first.endswith(":"):
        return first
    raised = next((line for line in others if line and not line.startswith(" ")), "")
    return f"{first} {raised}".rstrip()


def describe(job: Job, code: int | None) -> str:
    """Return a one-line summary of how a job ended."""
    status = read_json(job.run_dir / "status.json")
    metrics = job.run_dir / "metrics.jsonl"
    name, value = job.result()
    if code == 0 and value is not None:
        rate = read_epochs(metrics)[-1]["samples_per_second"]
        return f"{job.name}: finished, {name.replace('_', ' ')} {value:.4f}, {rate:,.0f} samples/s"

    failure = read_json(job.run_dir / "failure.json")
    reason = reason_of(failure["message"]) if failure else "see its output above"
    if status:
        state = status["status"]
    elif job.run_dir.parent.exists():
        state = "did not start"
    else:
        state = "its directory was deleted"
    return f"{job.name}: {state} (exit code {code}): {reason}"
