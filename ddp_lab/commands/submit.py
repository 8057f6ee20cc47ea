"""Submit a run, or a sweep over several values, as jobs of a scheduler.

ddp-lab submit slurm "hydra.launcher.sbatch=['--gpus-per-node=4']" strategy=ddp
ddp-lab submit kubernetes hydra.launcher.trainer.numProcPerNode=4 strategy=scratch,ddp,fsdp

It is short for `ddp-lab train --multirun hydra/launcher=slurm`. hydra.launcher.dry_run=true prints the jobs instead.
"""

from omegaconf import DictConfig

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.command import run_with_config

SCHEDULERS = ["slurm", "kubernetes"]


def main(arguments: list[str]) -> None:
    scheduler, *overrides = arguments or ["nothing"]
    if {"-h", "--help"} & {scheduler, *overrides}:
        return print(__doc__)
    if scheduler not in SCHEDULERS:
        raise ConfigError(f"ddp-lab submit: must be followed by {' or '.join(SCHEDULERS)}, got {scheduler}")
    run_with_config(train_here, ["--multirun", f"hydra/launcher={scheduler}", *overrides])


def train_here(cfg: DictConfig) -> None:
    """Never called: the launchers start their jobs elsewhere."""
