"""A Hydra launcher that submits every job of a sweep to Slurm with scripts/slurm/train.sbatch.

python train.py -m hydra/launcher=slurm "hydra.launcher.sbatch=['--gpus-per-node=4']" strategy=scratch,ddp,fsdp

A job's name in Slurm contains its run directory, so squeue shows which jobs are queued and no job is submitted twice.

python -m ddp_lab.launch.slurm LAUNCH [OVERRIDE...] prints, for train.sbatch, the status that the launch with torchrun's run id
LAUNCH recorded in the run directory that the overrides determine. It does not load torch, which takes seconds on a busy disk.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn

from ddp_lab.config.errors import ConfigError
from ddp_lab.launch.command_line import compose_config, split_config_dir
from ddp_lab.launch.sweep import Job, SweepLauncher, is_finished

SCRIPT = Path(__file__).with_name("train.sbatch")  # in a clone a link to scripts/slurm/train.sbatch
WHERE = re.compile(r"\+{0,2}(name|runs_dir|experiment)=")  # overrides that determine the run directory


class SlurmLauncher(SweepLauncher):
    """Submit every job of a sweep to Slurm.

    Args:
        sbatch: Options that sbatch gets for every job.
        dry_run: Whether to print the script and the commands instead of submitting them.
    """

    def __init__(self, sbatch: Sequence[str], dry_run: bool):
        self.sbatch, self.dry_run = sbatch, dry_run

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit the jobs that are neither finished nor in the queue; as `SweepLauncher.submit_all`.

        Args:
            job_overrides: The Hydra overrides of each job.
            initial_job_idx: Ignored; Hydra passes it.

        Raises:
            ConfigError: `sbatch` is not a list, Slurm is not installed or it does not respond.
        """
        # The annotation is not enforced: the value comes from the command line.
        if isinstance(self.sbatch, str) or not isinstance(self.sbatch, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"hydra.launcher.sbatch={self.sbatch}: must be a list: ['--gpus-per-node=4','--time=60']")
        jobs = self.jobs(job_overrides)
        if self.dry_run:
            print(SCRIPT.read_text(), *(shlex.join(self._command(job)) for job in jobs), sep="\n")
            return self.results(jobs)
        queue = jobs_in_queue()
        return self.submit_all(jobs, lambda job: self._submit(job, queue))

    def _slurm_name(self, job: Job) -> str:
        return f"{job.name} in {self.sweep_dir}"

    def _command(self, job: Job) -> list[str]:
        alone = (["env", "NPROC_PER_NODE=1"], ["--nodes=1"]) if job.one_process else ([], [])
        name = f"--job-name={self._slurm_name(job)}"
        return [*alone[0], "sbatch", *map(str, self.sbatch), *alone[1], name, str(SCRIPT), *job.overrides]

    def _submit(self, job: Job, queue: dict[str, str]) -> bool:
        """Submit a job unless it is finished or queued; return False if sbatch rejects it."""
        name = self._slurm_name(job)
        if is_finished(job) or name in queue:
            print(f"[{job.name}] already {'finished' if is_finished(job) else f'in the queue: {queue[name]}'}", flush=True)
            return True
        queue[name] = "submitted now"  # the sweep may contain the same job twice
        return self.submit(job, self._command(job))


def jobs_in_queue() -> dict[str, str]:
    """Return the id and state of the user's pending and running jobs, by job name.

    Raises:
        ConfigError: Slurm is not installed on this machine, or it does not respond.
    """
    if missing := [program for program in ("sbatch", "squeue") if shutil.which(program) is None]:
        raise ConfigError(
            f"hydra/launcher=slurm: {missing[0]} is not installed on this machine; start the sweep where Slurm jobs are "
            "submitted, or use hydra.launcher.dry_run=true to see the commands"
        )
    done = subprocess.run(["squeue", "--me", "--noheader", "--format=%i %T %j"], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"hydra/launcher=slurm: Slurm does not respond: {' '.join(done.stderr.split())}")
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.count(" ") >= 2]
    return {name: f"job {number} {state}" for number, state, name in lines}


def outcome(launch: str, arguments: list[str]) -> str:
    """Return the `status` of status.json; "none" if this launch has not written one."""
    config_dir, overrides = split_config_dir(arguments)
    cfg = compose_config([override for override in overrides if WHERE.match(override)], config_dir)
    try:
        record = json.loads(Path(cfg.runs_dir, cfg.name, "status.json").read_text())
    except OSError:
        return "none"
    return record["status"] if record["launch"] == launch else "none"  # another launch wrote it


if __name__ == "__main__":
    print(outcome(sys.argv[1], sys.argv[2:]))
