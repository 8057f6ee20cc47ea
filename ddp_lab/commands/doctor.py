"""Check the machines and the config before a launch.

Print one line per finding, or the error that would end the launch.

ddp-lab doctor data=fashion_mnist                                         overrides of train.py
torchrun --standalone --nproc_per_node=2 -m ddp_lab doctor strategy=ddp   launched as train.py

The output is what a report of a bug needs: versions, the environment variables that matter, what
the config changes, the devices. Values of secrets are hidden. It makes the checks of train.py, but
does not train and creates no run directory. It downloads a missing dataset. The exit code is 2 if
train.py would refuse the launch, else 0.
"""

from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ddp_lab.config.build import leaves
from ddp_lab.config.check import check
from ddp_lab.launchers.command import run_with_config
from ddp_lab.launchers.command_line import compose_config
from ddp_lab.world.process import env_int


def main(arguments: list[str]) -> None:
    run_with_config(examine, arguments)


def examine(cfg: DictConfig) -> None:
    """Examine the launch of this rank."""
    from ddp_lab.advise.fit import prepare_in_memory
    from ddp_lab.checkpoints.mirror import Mirror
    from ddp_lab.run.doctor import diagnose, introduce, show
    from ddp_lab.world.runtime import Runtime

    usual, current = (
        dict(leaves(OmegaConf.to_container(each, resolve=True)))
        for each in (compose_config([], None), cfg)
    )
    # first, so that the report of a refused config has it, too
    show(introduce(usual, current), env_int("RANK", 0) == 0)
    check(cfg)

    mirror = None
    if cfg.checkpoint.mirror:
        mirror = partial(Mirror, cfg.checkpoint.mirror, Path(cfg.runs_dir, cfg.name or "unnamed"))
    with Runtime(cfg.device, cfg.precision, cfg.timeout) as runtime:
        diagnose(runtime, partial(prepare_in_memory, cfg, runtime), mirror)
