"""Check the machines and the config before a launch: print one line per finding, with the remedy for each problem.

ddp-lab doctor data=fashion_mnist                                            same overrides as train.py
torchrun --standalone --nproc_per_node=2 -m ddp_lab doctor strategy=ddp      started like the launch to check

It does not train and creates no run directory, but it downloads a missing dataset, as train.py does. The exit code is 2 if a
finding is an error, else 0.
"""

from omegaconf import DictConfig

from ddp_lab.config.check import check
from ddp_lab.launch.command import run_with_config


def main(arguments: list[str]) -> None:
    run_with_config(examine, arguments)


def examine(cfg: DictConfig) -> None:
    """Examine the launch of this rank."""
    check(cfg)
    from ddp_lab.advise.fit import check_memory, choose_batch
    from ddp_lab.run.doctor import diagnose

    diagnose(cfg, choose_batch, check_memory)
