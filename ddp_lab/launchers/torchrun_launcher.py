"""The Hydra launcher of sweeps, hydra/launcher=torchrun: every job is a launch of its own.

ddp-lab train -m hydra.launcher.nproc_per_node=2 strategy=scratch,ddp,fsdp optimizer.lr=0.1,0.2

It is the default of conf/. Hydra's own launcher, hydra/launcher=basic, runs all jobs sequentially
in one process, so memory, statistics and process groups leak from job to job. Under torchrun, all
ranks would run the sweep in lock-step. With this launcher, every job has its own processes.

`register` lets Hydra find it.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra.utils import get_object
from omegaconf import DictConfig

from ddp_lab.config.compose import quote
from ddp_lab.config.errors import ConfigError, count
from ddp_lab.config.types import LIMITS
from ddp_lab.launchers.command import ENDS_WITH_STDIN
from ddp_lab.launchers.short_run import command_of
from ddp_lab.launchers.sweep import (
    Job,
    check_search,
    describe,
    directory_name,
    is_finished,
    job_return,
    lower_is_better,
    refuse_another,
    write_results,
)

# seconds that jobs have to write their last checkpoint when the sweep is interrupted
SAVE_TIMEOUT = 45.0


class TorchrunLauncher(Launcher):
    """Start the ranks of every job of a sweep by `ddp-lab train --nproc N`.

    Args:
        nproc_per_node: Number of ranks of each job.
        max_parallel: Number of jobs that run concurrently.
    """

    def __init__(self, nproc_per_node: int, max_parallel: int):
        self.nproc_per_node = nproc_per_node
        self.max_parallel = max_parallel
        self.processes: set[subprocess.Popen[str]] = set()
        self.ended: int | None = None  # the signal that ended the sweep
        self.jobs_so_far: list[Job] = []
        self._starting = threading.Lock()

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store Hydra's objects and create the sweep's directory.

        Raises:
            ConfigError: The directory cannot be created or is not writable, or a search could not
                learn from its jobs.
        """
        self.config = config
        self.hydra_context = hydra_context
        self.sweep_dir = Path(config.hydra.sweep.dir).resolve()
        self.searches = "direction" in config.hydra.get("sweeper", {})  # Optuna's sweeper
        if self.searches:
            check_search(config)
        try:  # Hydra writes there next, and would fail with a traceback
            self.sweep_dir.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.sweep_dir).close()
        except OSError as error:
            raise ConfigError(
                f"hydra.sweep.dir={self.sweep_dir}: cannot write to it ({error.strerror}); use "
                "another directory"
            ) from None

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs that are not finished; a failed job does not end the sweep.

        Args:
            job_overrides: The Hydra overrides of each job.
            initial_job_idx: Number of jobs before these; a sweeper that searches launches several
                times.

        Raises:
            ConfigError: The jobs that run concurrently need more GPUs than are visible, or a
                launcher option is not a positive integer.
            SystemExit: A signal ended the sweep, or a job failed; raised after the last job. A
                search goes on if the job had begun to train: it may have diverged.
        """
        slots = self._slots()
        jobs = self._jobs(job_overrides)
        if len(jobs) > 1:
            numbers = f"s {initial_job_idx + 1} to {initial_job_idx + len(jobs)}"
        else:
            numbers = f" {initial_job_idx + 1}"

        print(f"job{numbers} in {self.sweep_dir}", flush=True)
        different = {job.run_dir: job for job in jobs}  # a search may propose the same job twice
        with self._ended_by_signals(), ThreadPoolExecutor(self.max_parallel) as pool:
            ended = dict(
                zip(
                    different,
                    pool.map(lambda job: self._run(job, slots), different.values()),
                    strict=True,
                )
            )

        codes = [ended[job.run_dir] for job in jobs]
        if self.ended:
            print(
                "the sweep was interrupted; the same command with its hydra.sweep.dir resumes it",
                flush=True,
            )
            sys.exit(128 + self.ended)

        self.jobs_so_far += jobs
        lines = [describe(job, code) for job, code in zip(jobs, codes, strict=True)]
        print("\n".join(["", *lines, *write_results(self.sweep_dir, self.jobs_so_far)]), flush=True)
        failed = [job for job, code in zip(jobs, codes, strict=True) if code]
        if failed and not (
            self.searches and all((job.run_dir / "status.json").exists() for job in failed)
        ):
            sys.exit(1)
        return [job_return(job, job in failed) for job in jobs]

    def _jobs(self, job_overrides: Sequence[Sequence[str]]) -> list[Job]:
        """Return the jobs of the sweep.

        Args:
            job_overrides: The Hydra overrides of each job.

        Raises:
            ConfigError: A job's run directory contains a run with another config.
        """
        jobs: list[Job] = []
        own_keys = ("name", "runs_dir")  # set below for each job
        swept = [
            [o for o in filter_overrides(job) if o.partition("=")[0] not in own_keys]
            for job in job_overrides
        ]
        chosen = self._chosen_keys()
        for overrides, all_overrides in zip(swept, job_overrides, strict=True):
            cfg = self.hydra_context.config_loader.load_sweep_config(
                self.config, list(all_overrides)
            )
            name = directory_name(
                [o for o in overrides if o.partition("=")[0] in chosen] or overrides
            )
            refuse_another(self.sweep_dir / name, cfg)
            overrides += [f"runs_dir={quote(str(self.sweep_dir))}", f"name={quote(name)}"]
            one_process = get_object(cfg.strategy["_target_"]).one_process
            lower = lower_is_better(cfg)
            run_dir = self.sweep_dir / name
            arguments = self._config_dir() + overrides
            limits = {key: cfg.get(key) for key in ("epochs", *LIMITS)}
            jobs.append(
                Job(
                    name=name,
                    overrides=arguments,
                    run_dir=run_dir,
                    limits=limits,
                    optimize=cfg.optimize,
                    one_process=one_process,
                    lower_is_better=lower,
                )
            )
        return jobs

    def _chosen_keys(self) -> set[str]:
        """Return the keys whose values the sweep chooses.

        They have several values, here or in the sweeper's config.
        """
        overrides = OverridesParser.create().parse_overrides(list(self.config.hydra.overrides.task))
        return {each.get_key_element() for each in overrides if each.is_sweep_override()} | set(
            self.config.hydra.sweeper.params or ()
        )

    def _config_dir(self) -> list[str]:
        """Return the option --config-dir with which the sweep was started; [] without one."""
        sources = self.config.hydra.runtime.config_sources
        folders = [source.path for source in sources if source.provider == "command-line"]
        return ["--config-dir", *folders] if folders else []

    def _slots(self) -> "queue.Queue[str | None]":
        """Return a queue with a value of CUDA_VISIBLE_DEVICES per concurrent job.

        None leaves the variable unchanged.

        Raises:
            ConfigError: A launcher option is not a positive integer, or there are too few GPUs.
        """
        for key in ("nproc_per_node", "max_parallel"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"hydra.launcher.{key}={value}: must be an integer of at least 1")
        # not at the top of the file: Hydra imports the launchers at every start, even for --help
        import torch

        gpus = torch.cuda.device_count()
        wanted = self.nproc_per_node * self.max_parallel
        slots: queue.Queue[str | None] = queue.Queue()
        if gpus == 0 or self.config.device == "cpu":
            for _ in range(self.max_parallel):
                slots.put(None)
            return slots

        if wanted > gpus:
            raise ConfigError(
                f"hydra.launcher.max_parallel={self.max_parallel}: concurrent jobs of "
                f"{count(self.nproc_per_node, 'rank')} need {count(wanted, 'GPU')}, but this "
                f"machine shows {gpus}; lower "
                "max_parallel or nproc_per_node, or set device=cpu"
            )

        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = names if len(names) == gpus else [str(i) for i in range(gpus)]
        for i in range(self.max_parallel):
            slots.put(",".join(names[i * self.nproc_per_node : (i + 1) * self.nproc_per_node]))
        return slots

    def _run(self, job: Job, slots: "queue.Queue[str | None]") -> int | None:
        """Run a job and return its exit code.

        It is 0 if the job is already finished, None if an interrupt prevented its start.
        """
        if is_finished(job):
            print(f"[{job.name}] already finished", flush=True)
            return 0
        gpus = slots.get()
        try:
            return self._run_on(gpus, job)
        finally:
            slots.put(gpus)  # for the next waiting job

    def _run_on(self, gpus: str | None, job: Job) -> int | None:
        """Run a job as `_run`, with a value of CUDA_VISIBLE_DEVICES, unless that is None."""
        command, environment = command_of(
            job.overrides, None if job.one_process else self.nproc_per_node
        )
        environment |= {ENDS_WITH_STDIN: "1"} | (
            {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        )

        with self._starting:
            if self.ended:
                return None
            # Each job has its own session, so that a signal from the terminal reaches it only once,
            # through this process.
            process = subprocess.Popen(
                command,
                env=environment,
                # nothing is written: it closes when this process ends, also by SIGKILL
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",  # what a job writes may be anything
                start_new_session=True,
            )
            self.processes.add(process)

        try:
            with process:  # until it has ended
                assert process.stdout  # it is a pipe
                for line in process.stdout:
                    print(f"[{job.name}] {line}", end="", flush=True)
                return process.wait()
        finally:
            self.processes.discard(process)

    @contextlib.contextmanager
    def _ended_by_signals(self) -> Generator[None, None, None]:
        """On SIGTERM or Ctrl-C, let the running jobs save and exit, and start no other.

        Kill those that do not exit in time.
        """

        def end(number: int, frame: object) -> None:
            # a second SIGTERM would end torchrun's agent and, with it, the ranks while they save
            if self.ended:
                return
            with self._starting:
                self.ended = number
                for process in list(self.processes):
                    process.terminate()
            killer = threading.Timer(
                SAVE_TIMEOUT, lambda: [process.kill() for process in list(self.processes)]
            )
            killer.daemon = True
            killer.start()

        before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def register() -> None:
    """Let `hydra/launcher=torchrun` name TorchrunLauncher.

    Hydra constructs only classes that it finds by a name within the package hydra_plugins, which
    plug-ins share. A directory of ours with such a package would have to be on sys.path. In place
    of it, a module that exists in memory alone has the class.
    """
    registry = Plugins.instance()  # imports hydra_plugins, if another plug-in is installed
    shared = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    module = ModuleType("hydra_plugins.ddp_lab")
    name = TorchrunLauncher.__name__
    plugin = type(name, (TorchrunLauncher,), {"__module__": module.__name__})
    setattr(module, name, plugin)
    setattr(shared, "ddp_lab", module)  # noqa: B010
    registry.register(plugin)
