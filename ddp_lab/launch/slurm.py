"""A Hydra launcher that submits every job of a sweep to Slurm, by scripts/slurm/train.sbatch.

python train.py -m hydra/launcher=slurm "hydra.launcher.sbatch=['--gpus-per-node=4']" strategy=scratch,ddp,fsdp
"""

import shlex
import shutil
import subprocess
from collections.abc import Sequence

from hydra.core.utils import JobReturn

from ddp_lab.errors import ConfigError
from ddp_lab.launch.sweep import ROOT, SweepLauncher, is_finished, job_return

SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"


class SlurmLauncher(SweepLauncher):
    """
    Args:
        sbatch: its options, for every job.
        dry_run: print the script and the command lines, and submit nothing.
    """

    def __init__(self, sbatch: Sequence[str], dry_run: bool):
        self.sbatch, self.dry_run = list(sbatch), dry_run

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """
        Raises:
            ConfigError: there is no sbatch, or it refuses a job.
        """
        if not self.dry_run and shutil.which("sbatch") is None:
            raise ConfigError(
                "hydra/launcher=slurm: there is no sbatch here; run it where jobs are submitted, or look at "
                "hydra.launcher.dry_run=true"
            )
        jobs = self.jobs(job_overrides)
        if self.dry_run:
            print(SCRIPT.read_text())
        for job in jobs:
            command = ["sbatch", *self.sbatch, str(SCRIPT), *job.words]
            if self.dry_run:
                print(shlex.join(command))
            elif is_finished(job):
                print(f"[{job.name}] finished before")
            else:
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
                if done.returncode:
                    raise ConfigError(f"sbatch refused {job.name}: {done.stderr.strip()}")
                print(f"[{job.name}] {done.stdout.strip()}")
        return [job_return(job.words) for job in jobs]
