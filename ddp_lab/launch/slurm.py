"""A Hydra launcher that submits every job of a sweep to Slurm, by scripts/slurm/train.sbatch.

python train.py -m hydra/launcher=slurm "hydra.launcher.sbatch=['--gpus-per-node=4']" strategy=scratch,ddp,fsdp

A job's name in Slurm says its directory too, so squeue knows what is under way, and nothing is submitted twice into one.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from hydra.core.utils import JobReturn

from ddp_lab.config.errors import ConfigError
from ddp_lab.launch.sweep import ROOT, Job, SweepLauncher, is_finished, job_return

SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"


class SlurmLauncher(SweepLauncher):
    """
    Args:
        sbatch: its options, for every job.
        dry_run: print the script and the command lines, and submit nothing.
    """

    def __init__(self, sbatch: Sequence[str], dry_run: bool):
        self.sbatch, self.dry_run = sbatch, dry_run

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submits the jobs that are neither finished nor in the queue; one that is refused does not end the sweep.

        Raises:
            ConfigError: options that are no list, or there is no Slurm here that answers.
            SystemExit: sbatch refused some job, behind the last one.
        """
        if isinstance(self.sbatch, str) or not isinstance(self.sbatch, Sequence):
            raise ConfigError(f"hydra.launcher.sbatch={self.sbatch}: must be a list: ['--gpus-per-node=4','--time=60']")
        jobs = self.jobs(job_overrides)
        if self.dry_run:
            print(SCRIPT.read_text(), *(shlex.join(self._command(job)) for job in jobs), sep="\n")
        else:
            queue = jobs_in_queue()
            print(f"{len(jobs)} jobs in {self.sweep_dir}", flush=True)
            taken = [self._submit(job, queue) for job in jobs]
            if not all(taken):
                sys.exit(1)
        return [job_return(job.words) for job in jobs]

    def _slurm_name(self, job: Job) -> str:
        return f"{job.name} in {self.sweep_dir}"

    def _command(self, job: Job) -> list[str]:
        alone = (["env", "NPROC_PER_NODE=1"], ["--nodes=1"]) if job.one_process else ([], [])
        name = f"--job-name={self._slurm_name(job)}"
        return [*alone[0], "sbatch", *map(str, self.sbatch), *alone[1], name, str(SCRIPT), *job.words]

    def _submit(self, job: Job, queue: dict[str, str]) -> bool:
        """False where sbatch refuses."""
        name = self._slurm_name(job)
        if is_finished(job):
            told = "finished before"
        elif name in queue:
            told = f"in the queue before, {queue[name]}"
        else:
            done = subprocess.run(self._command(job), cwd=ROOT, capture_output=True, text=True)
            told = " ".join(f"{done.stdout} {done.stderr}".split())
            if done.returncode:
                print(f"[{job.name}] not submitted: {told}", flush=True)
                return False
            queue[name] = told  # the sweep may have the same job twice
        print(f"[{job.name}] {told}", flush=True)
        return True


def jobs_in_queue() -> dict[str, str]:
    """The user's jobs that wait or run: the id and state of each, by its name.

    Raises:
        ConfigError: there is no Slurm here, or it does not answer.
    """
    if missing := [program for program in ("sbatch", "squeue") if shutil.which(program) is None]:
        raise ConfigError(
            f"hydra/launcher=slurm: there is no {missing[0]} here; run it where jobs are submitted, or look at "
            "hydra.launcher.dry_run=true"
        )
    done = subprocess.run(["squeue", "--me", "--noheader", "--format=%i %T %j"], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"hydra/launcher=slurm: Slurm does not answer: {' '.join(done.stderr.split())}")
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.count(" ") >= 2]
    return {name: f"job {number} {state}" for number, state, name in lines}
