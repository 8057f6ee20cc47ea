"""What the launchers share: the jobs of a sweep, each with a directory of its own in the sweep's."""

import hashlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from ddp_lab.config.errors import ConfigError
from ddp_lab.resilience.run_directory import read_json

ROOT = Path(__file__).parent.parent.parent
LONGEST = 120  # characters of a name
MAY_CHANGE = {"name", "runs_dir", "resume", "epochs", "timeout", "checkpoint", "inject"}  # when a sweep goes on


@dataclass(frozen=True)
class Job:
    """
    Attributes:
        name: of its run directory: the words by which it differs from the other jobs.
        words: for train.py.
        one_process: whether its strategy drives all devices from one process.
    """

    name: str
    words: list[str]
    run_dir: Path
    epochs: int
    one_process: bool


class SweepLauncher(Launcher):
    """A Hydra launcher whose jobs are launches of train.py."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """
        Raises:
            ConfigError: the sweep's directory cannot be made or written.
        """
        self.config, self.hydra_context = config, hydra_context
        try:  # Hydra writes there next, and would answer by a traceback
            self.sweep_dir.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.sweep_dir).close()
        except OSError as error:
            raise ConfigError(
                f"hydra.sweep.dir={self.sweep_dir}: cannot write there ({error.strerror}); choose another directory"
            ) from None

    @property
    def sweep_dir(self) -> Path:
        return Path(self.config.hydra.sweep.dir).resolve()

    def jobs(self, job_overrides: Sequence[Sequence[str]]) -> list[Job]:
        """
        Raises:
            ConfigError: a job's directory holds a run of another config.
        """
        jobs: list[Job] = []
        given = [[w for w in filter_overrides(o) if w.partition("=")[0] not in ("name", "runs_dir")] for o in job_overrides]
        shared = set.intersection(*map(set, given)) if len(given) > 1 else set()
        for words, overrides in zip(given, job_overrides, strict=True):
            cfg = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            name = directory_name([word for word in words if word not in shared])
            refuse_another(self.sweep_dir / name, cfg)
            words += [f"runs_dir={quote(str(self.sweep_dir))}", f"name={quote(name)}"]
            one_process = get_object(cfg.strategy["_target_"]).one_process
            jobs.append(Job(name, words, self.sweep_dir / name, cfg.epochs, one_process))
        return jobs


def refuse_another(run_dir: Path, cfg: DictConfig) -> None:
    """Names leave out what all jobs share, so a directory may be another sweep's."""
    if not (run_dir / "config.yaml").exists():
        return
    there = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
    here = OmegaConf.to_container(cfg, resolve=True)
    changed = [key for key in there if key not in MAY_CHANGE and there[key] != here.get(key)]
    if changed:
        raise ConfigError(
            f"hydra.sweep.dir={run_dir.parent}: {run_dir.name} was begun there with another {changed[0]} "
            f"({there[changed[0]]}, now {here.get(changed[0])}); choose another directory"
        )


def directory_name(words: Sequence[str]) -> str:
    """As the words say, in letters that a run's name may have; with a hash where something of it had to go."""
    plain = ",".join(words)
    name = re.sub(r"[^\w.=,+-]", "-", plain).lstrip(".") or "job"
    if name != plain or len(name) > LONGEST:
        name = f"{name[:LONGEST]}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"
    return name


def quote(value: str) -> str:
    """For Hydra's grammar, in which commas and equal signs mean something, and backslashes only before a quote."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + found[2].replace("'", "\\'"), value) + "'"


def is_finished(job: Job) -> bool:
    status = read_json(job.run_dir / "status.json")
    return status is not None and status["status"] == "finished" and status["epoch"] >= job.epochs


def job_return(words: Sequence[str]) -> JobReturn:
    """What Hydra wants of every job."""
    return JobReturn(overrides=list(words), status=JobStatus.COMPLETED)
