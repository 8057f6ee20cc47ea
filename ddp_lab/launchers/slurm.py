"""Submission to Slurm with scripts/slurm/train.sbatch, and a Hydra launcher that submits every job of a sweep.

python train.py -m hydra/launcher=slurm "hydra.launcher.sbatch=['--gpus-per-node=4']" strategy=scratch,ddp,fsdp

A job's name in Slurm contains its run directory, so squeue shows which jobs are queued and no job is submitted twice.

python -m ddp_lab.launchers.slurm LAUNCH [OVERRIDE...] prints, for train.sbatch, the status that the launch with torchrun's run
id LAUNCH recorded in the run directory that the overrides determine. It does not load torch, which takes seconds on a busy
disk.
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
from ddp_lab.launchers.command_line import compose_config, split_config_dir
from ddp_lab.launchers.sweep import Job, SweepLauncher, is_finished, job_return

SCRIPT = Path(__file__).with_name("train.sbatch")  # in a clone a link to scripts/slurm/train.sbatch
WHERE = re.compile(r"\+{0,2}(name|runs_dir|experiment)=")  # overrides that determine the run directory


class SlurmLauncher(SweepLauncher):
    """Submit every job of a sweep to Slurm, and do not wait for them.

    Args:
        sbatch: Options that sbatch gets for every job.
        dry_run: Whether to print the script and the commands instead of submitting them.
    """

    waits = False

    def __init__(self, sbatch: Sequence[str], dry_run: bool):
        self.sbatch, self.dry_run = sbatch, dry_run

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit the jobs that are neither finished nor in Slurm's queue; a rejected job does not end the sweep.

        Args:
            job_overrides: The Hydra overrides of each job.
            initial_job_idx: Ignored; Hydra passes it.

        Raises:
            ConfigError: `sbatch` is not a list, or Slurm is not installed or does not respond.
            SystemExit: Slurm rejected a job; raised after the last job.
        """
        # The annotation is not enforced: the value comes from the command line.
        if isinstance(self.sbatch, str) or not isinstance(self.sbatch, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"hydra.launcher.sbatch={self.sbatch}: must be a list: ['--gpus-per-node=4','--time=60']")
        jobs = self.jobs(job_overrides)
        if self.dry_run:
            print("\n".join([SCRIPT.read_text(), *(shlex.join(self._command(job)) for job in jobs)]))
        else:
            known = queue()
            print(f"{len(jobs)} jobs in {self.sweep_dir}", flush=True)
            accepted = [self._submit(job, known) for job in jobs]
            if not all(accepted):
                sys.exit(1)
        return list(map(job_return, jobs))

    def _slurm_name(self, job: Job) -> str:
        return f"{job.name} in {self.sweep_dir}"

    def _command(self, job: Job) -> list[str]:
        return sbatch_command([*map(str, self.sbatch)], job.one_process, self._slurm_name(job), job.overrides)

    def _submit(self, job: Job, known: dict[str, str]) -> bool:
        """Submit a job unless it is finished or among `known`, and add it there. Return whether that worked."""
        name = self._slurm_name(job)
        if is_finished(job) or name in known:
            print(f"[{job.name}] already {'finished' if is_finished(job) else f'in the queue: {known[name]}'}", flush=True)
            return True
        known[name] = "submitted now"  # the sweep may contain the same job twice
        done = subprocess.run(self._command(job), capture_output=True, text=True)
        answer = " ".join(f"{done.stdout} {done.stderr}".split())
        print(f"[{job.name}] {'not submitted: ' * bool(done.returncode)}{answer}", flush=True)
        return done.returncode == 0


def sbatch_command(options: Sequence[str], one_process: bool, name: str, overrides: Sequence[str]) -> list[str]:
    """Return the command that submits train.sbatch.

    Args:
        options: options of sbatch.
        one_process: whether the strategy drives all devices of one node from one process.
        name: the job's name.
        overrides: arguments of the script, the Hydra overrides.
    """
    alone = (["env", "NPROC_PER_NODE=1"], ["--nodes=1"]) if one_process else ([], [])
    return [*alone[0], "sbatch", *options, *alone[1], f"--job-name={name}", str(SCRIPT), *overrides]


def queue() -> dict[str, str]:
    """Return the number and the state of the user's jobs in Slurm's queue, by name.

    Raises:
        ConfigError: Slurm is not installed on this machine, or does not respond.
    """
    if shutil.which("squeue") is None:
        raise ConfigError(
            "hydra/launcher=slurm: squeue is not installed on this machine; start the sweep where it is, or use "
            "hydra.launcher.dry_run=true to see the jobs"
        )
    done = subprocess.run(["squeue", "--me", "--noheader", "--format=%i %T %j"], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"hydra/launcher=slurm: squeue failed: {' '.join(done.stderr.split())}")
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
