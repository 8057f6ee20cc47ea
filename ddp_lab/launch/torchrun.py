"""A Hydra launcher that gives every job of a sweep a torchrun world of its own.

python train.py -m hydra/launcher=torchrun hydra.launcher.nproc_per_node=2 strategy=scratch,ddp,fsdp optimizer.lr=0.1,0.2

Hydra's own launcher runs the jobs in one process, one after the other, so that memory, statistics and process groups leak from
job to job; under torchrun all ranks would sweep in lock-step. Here a job starts and ends with its processes.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hydra.core.utils import JobReturn

from ddp_lab.config.errors import ConfigError
from ddp_lab.launch.sweep import ROOT, Job, SweepLauncher, is_finished, job_return
from ddp_lab.resilience.run_directory import read_json

PATIENCE = 45.0  # seconds that a job has for its last checkpoint, when the sweep is ended


def world_command(words: Sequence[str], ranks: int | None) -> list[str]:
    """Starts train.py with `words` in a torchrun world of its own, on a port of its own; `ranks` None: as one process."""
    world = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *world, str(ROOT / "train.py"), *words]


def new_folder(path: Path) -> Path:
    """Makes the folder that a script's --out names; ends the script where runs of before would be taken for its own."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            sys.exit(f"error: --out {path}: is not empty; choose another")
    except OSError as error:
        sys.exit(f"error: --out {path}: cannot be made ({error.strerror}); choose another")
    return path.resolve()


class TorchrunLauncher(SweepLauncher):
    """
    Args:
        nproc_per_node: ranks of each job.
        max_parallel: jobs at a time.
    """

    def __init__(self, nproc_per_node: int, max_parallel: int):
        self.nproc_per_node, self.max_parallel = nproc_per_node, max_parallel
        self.processes: set[subprocess.Popen] = set()
        self.ended = False

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs the jobs that are not finished yet; one that fails does not end the sweep.

        Raises:
            ConfigError: there are not so many GPUs.
            SystemExit: some job failed, behind the last one and the summary.
        """
        slots = self._slots()
        jobs = self.jobs(job_overrides)
        print(f"{len(jobs)} jobs in {self.sweep_dir}", flush=True)
        with self._ended_by_signals(), ThreadPoolExecutor(self.max_parallel) as pool:
            codes = list(pool.map(lambda job: self._run(job, slots), jobs))
        print("\n".join(["", *(describe(job, code) for job, code in zip(jobs, codes, strict=True))]), flush=True)
        if any(codes):
            sys.exit(1)
        return [job_return(job.words) for job in jobs]

    def _slots(self) -> "queue.Queue[str | None]":
        """What CUDA_VISIBLE_DEVICES of each job at a time is; None: as it is.

        Raises:
            ConfigError: not a count, or more GPUs than there are.
        """
        for key in ("nproc_per_node", "max_parallel"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"hydra.launcher.{key}={value}: must be an integer of at least 1")
        import torch  # Hydra loads the launchers at every start, --help included

        gpus, wanted = torch.cuda.device_count(), self.nproc_per_node * self.max_parallel
        slots: queue.Queue[str | None] = queue.Queue()
        if gpus == 0 or self.config.device == "cpu":
            for _ in range(self.max_parallel):
                slots.put(None)
            return slots
        if wanted > gpus:
            raise ConfigError(
                f"hydra.launcher.max_parallel={self.max_parallel}: that many jobs of {self.nproc_per_node} ranks need {wanted} "
                f"GPUs, here are {gpus}; lower max_parallel or nproc_per_node, or set device=cpu"
            )
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = names if len(names) == gpus else [str(i) for i in range(gpus)]
        for i in range(self.max_parallel):
            slots.put(",".join(names[i * self.nproc_per_node : (i + 1) * self.nproc_per_node]))
        return slots

    def _run(self, job: Job, slots: "queue.Queue[str | None]") -> int | None:
        """The job's exit code; 0 without a start where it is finished, None where the sweep was ended before."""
        if is_finished(job):
            print(f"[{job.name}] finished before", flush=True)
            return 0
        gpus = slots.get()
        if self.ended:
            slots.put(gpus)  # for the next one that waits
            return None
        environment = os.environ | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
        command = world_command(job.words, None if job.one_process else self.nproc_per_node)
        # A session of its own: what a terminal sends to all goes to the jobs through us, once.
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.processes.add(process)
        for line in process.stdout:
            print(f"[{job.name}] {line}", end="", flush=True)
        code = process.wait()
        self.processes.discard(process)
        slots.put(gpus)
        return code

    @contextlib.contextmanager
    def _ended_by_signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C end the jobs, which save, and then the sweep; started again it goes on."""
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def end(number: int, frame: object) -> None:
            if not self.ended:
                self.ended = True
                threading.Thread(target=self._end_for_good, args=(128 + number,)).start()

        for number in before:
            signal.signal(number, end)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_for_good(self, code: int) -> None:
        deadline = time.monotonic() + PATIENCE
        terminated: set[subprocess.Popen] = set()
        while self.processes and time.monotonic() < deadline:
            # Also those that another thread has just started. Each once: a second SIGTERM ends torchrun's agent, and with it
            # the ranks, while they save.
            for process in set(self.processes) - terminated:
                process.terminate()
                terminated.add(process)
            time.sleep(0.1)
        for process in list(self.processes):
            process.kill()
        print("the sweep was ended; the same line with its hydra.sweep.dir goes on", flush=True)
        os._exit(code)


def describe(job: Job, code: int | None) -> str:
    """One line: how it ended, and at what."""
    if code is None:
        return f"{job.name}: not begun"
    status = read_json(job.run_dir / "status.json")
    metrics = job.run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    if code == 0 and lines:
        last = json.loads(lines[-1])
        return f"{job.name}: finished, test accuracy {last['test_accuracy']:.4f}, {last['samples_per_second']:,.0f} samples/s"
    failure = read_json(job.run_dir / "failure.json")
    reason = failure["message"].splitlines()[0] if failure else "see its output above"
    state = status["status"] if status else "did not start" if job.run_dir.parent.exists() else "its directory is gone"
    return f"{job.name}: {state} (exit code {code}): {reason}"
