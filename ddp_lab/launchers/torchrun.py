"""A Hydra launcher that starts torchrun once for every job of a sweep.

python train.py -m hydra/launcher=torchrun hydra.launcher.nproc_per_node=2 strategy=scratch,ddp,fsdp optimizer.lr=0.1,0.2

Hydra's own launcher runs all jobs sequentially in one process, so memory, statistics and process groups leak from job to job.
Under torchrun, all ranks would run the sweep in lock-step. With this launcher, every job has its own processes.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hydra.core.utils import JobReturn

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.sweep import Job, SweepLauncher, is_finished, job_return, write_results
from ddp_lab.observe.metrics_file import read_epochs
from ddp_lab.resilience.run_directory import read_json

ROOT = Path(__file__).parents[2]
# Of a clone, which may not be installed, train.py is started. It finds ddp_lab from any directory.
ENTRY = [str(ROOT / "train.py")] if (ROOT / "pyproject.toml").is_file() else ["-m", "ddp_lab"]
SAVE_TIMEOUT = 45.0  # seconds that jobs have to write their last checkpoint when the sweep is interrupted


def world_command(overrides: Sequence[str], ranks: int | None) -> list[str]:
    """Return the command that trains with `overrides` on `ranks` ranks; None means one process without torchrun."""
    world = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *world, *ENTRY, *overrides]


class TorchrunLauncher(SweepLauncher):
    """Run every job of a sweep under its own torchrun.

    Args:
        nproc_per_node: Number of ranks of each job.
        max_parallel: Number of jobs that run concurrently.
    """

    def __init__(self, nproc_per_node: int, max_parallel: int):
        self.nproc_per_node, self.max_parallel = nproc_per_node, max_parallel
        self.processes: set[subprocess.Popen[str]] = set()
        self.ended: int | None = None  # the signal that ended the sweep
        self.jobs_so_far: list[Job] = []
        self._starting = threading.Lock()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs that are not finished; a failed job does not end the sweep.

        Args:
            job_overrides: The Hydra overrides of each job.
            initial_job_idx: Number of jobs before these; a sweeper that searches launches several times.

        Raises:
            ConfigError: The jobs that run concurrently need more GPUs than are visible, or a launcher option is
                not a positive integer.
            SystemExit: A signal ended the sweep, or a job failed; raised after the last job. A search goes on if the job had
                begun to train: it may have diverged.
        """
        slots = self._slots()
        jobs = self.jobs(job_overrides)
        numbers = f"s {initial_job_idx + 1} to {initial_job_idx + len(jobs)}" if len(jobs) > 1 else f" {initial_job_idx + 1}"
        print(f"job{numbers} in {self.sweep_dir}", flush=True)
        different = {job.run_dir: job for job in jobs}  # a search may propose the same job twice
        with self._ended_by_signals(), ThreadPoolExecutor(self.max_parallel) as pool:
            ended = dict(zip(different, pool.map(lambda job: self._run(job, slots), different.values()), strict=True))
        codes = [ended[job.run_dir] for job in jobs]
        if self.ended:
            print("the sweep was interrupted; the same command with its hydra.sweep.dir resumes it", flush=True)
            sys.exit(128 + self.ended)
        self.jobs_so_far += jobs
        lines = [describe(job, code) for job, code in zip(jobs, codes, strict=True)]
        print("\n".join(["", *lines, *write_results(self.sweep_dir, self.jobs_so_far)]), flush=True)
        failed = [job for job, code in zip(jobs, codes, strict=True) if code]
        if failed and not (self.searches and all((job.run_dir / "status.json").exists() for job in failed)):
            sys.exit(1)
        return [job_return(job, job in failed) for job in jobs]

    def _slots(self) -> "queue.Queue[str | None]":
        """Return a queue with a value of CUDA_VISIBLE_DEVICES for each concurrent job; None leaves the variable unchanged.

        Raises:
            ConfigError: A launcher option is not a positive integer, or there are too few GPUs.
        """
        for key in ("nproc_per_node", "max_parallel"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"hydra.launcher.{key}={value}: must be an integer of at least 1")
        import torch  # not at the top of the file: Hydra imports the launchers at every start, even for --help

        gpus, wanted = torch.cuda.device_count(), self.nproc_per_node * self.max_parallel
        slots: queue.Queue[str | None] = queue.Queue()
        if gpus == 0 or self.config.device == "cpu":
            for _ in range(self.max_parallel):
                slots.put(None)
            return slots
        if wanted > gpus:
            raise ConfigError(
                f"hydra.launcher.max_parallel={self.max_parallel}: concurrent jobs of {self.nproc_per_node} ranks need "
                f"{wanted} GPUs, but {gpus} are visible; lower max_parallel or nproc_per_node, or set device=cpu"
            )
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = names if len(names) == gpus else [str(i) for i in range(gpus)]
        for i in range(self.max_parallel):
            slots.put(",".join(names[i * self.nproc_per_node : (i + 1) * self.nproc_per_node]))
        return slots

    def _run(self, job: Job, slots: "queue.Queue[str | None]") -> int | None:
        """Run a job and return its exit code: 0 if it is already finished, None if an interrupt prevented its start."""
        if is_finished(job):
            print(f"[{job.name}] already finished", flush=True)
            return 0
        gpus = slots.get()
        environment = os.environ | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
        command = world_command(job.overrides, None if job.one_process else self.nproc_per_node)
        with self._starting:
            if self.ended:
                slots.put(gpus)  # for the next waiting job
                return None
            # Each job has its own session, so that a signal from the terminal reaches it only once, through this process.
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
            self.processes.add(process)
        assert process.stdout  # it is a pipe
        for line in process.stdout:
            print(f"[{job.name}] {line}", end="", flush=True)
        code = process.wait()
        self.processes.discard(process)
        slots.put(gpus)
        return code

    @contextlib.contextmanager
    def _ended_by_signals(self) -> Generator[None, None, None]:
        """On SIGTERM or Ctrl-C, let the running jobs save and exit, kill those that do not in time, and start no other."""

        def end(number: int, frame: object) -> None:
            if self.ended:  # a second SIGTERM would end torchrun's agent and, with it, the ranks while they save
                return
            with self._starting:
                self.ended = number
                for process in list(self.processes):
                    process.terminate()
            killer = threading.Timer(SAVE_TIMEOUT, lambda: [process.kill() for process in list(self.processes)])
            killer.daemon = True
            killer.start()

        before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def describe(job: Job, code: int | None) -> str:
    """Return a one-line summary of how a job ended."""
    status = read_json(job.run_dir / "status.json")
    metrics = job.run_dir / "metrics.jsonl"
    name, value = job.result()
    if code == 0 and value is not None:
        rate = read_epochs(metrics)[-1]["samples_per_second"]
        return f"{job.name}: finished, {name.replace('_', ' ')} {value:.4f}, {rate:,.0f} samples/s"
    failure = read_json(job.run_dir / "failure.json")
    reason = failure["message"].splitlines()[0] if failure else "see its output above"
    state = status["status"] if status else "did not start" if job.run_dir.parent.exists() else "its directory was deleted"
    return f"{job.name}: {state} (exit code {code}): {reason}"
