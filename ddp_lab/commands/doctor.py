"""Check the machines and the config before a launch.

Print one line per finding, or the error that would end the launch.

ddp-lab doctor data=fashion_mnist                                         overrides of train.py
torchrun --standalone --nproc_per_node=2 -m ddp_lab doctor strategy=ddp   launched as train.py

The output is what a report of a bug needs: versions, the environment variables that matter, what
the config changes, the devices. Values of secrets are hidden. It makes the checks of train.py, but
does not train and creates no run directory. It downloads a missing dataset. The exit code is 2 if
train.py would refuse the launch, else 0.

ddp-lab doctor --fabric                                                   ranks that it starts
torchrun --nnodes=2 --nproc_per_node=8 ... -m ddp_lab doctor --fabric     those of this launch
ddp-lab doctor --fabric --hosts node1,node2                               those of hosts, over ssh

--fabric measures each pair of ranks instead of constructing the run, and looks for what makes
launches hang or slow. Without torchrun it starts a rank for each GPU, or two on a CPU, and takes
the options of `ddp-lab train`. The exit code is also 2 if two ranks cannot exchange.
"""

import os
import sys
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from ddp_lab.config.build import leaves, plain
from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.command import OVER_SSH, run_with_config
from ddp_lab.launchers.command_line import compose_config
from ddp_lab.world.process import env_int

FABRIC = "--fabric"


def main(arguments: list[str]) -> None:
    over_ssh = sorted({each.partition("=")[0] for each in arguments} & OVER_SSH)
    if FABRIC not in arguments:
        if over_ssh:
            raise ConfigError(
                f"{over_ssh[0]}: is an option of `ddp-lab doctor --fabric`, which examines several "
                "machines, and of `ddp-lab train`; add --fabric"
            )
        return run_with_config(examine, arguments)
    others = [each for each in arguments if each != FABRIC]
    if over_ssh:
        from ddp_lab.launchers.hosts import launch_on_hosts

        sys.exit(launch_on_hosts(others, wants_outcome=False, command=["doctor", FABRIC]))
    if "RANK" not in os.environ:
        from ddp_lab.launchers.fabric.start import read_launch, start

        launch = read_launch(others)
        if launch:
            sys.exit(start(launch, ["doctor", FABRIC]))
    run_with_config(examine_machines, others)


def introduce_and_check(cfg: DictConfig) -> None:
    """Print what a report of a bug needs, and check the config.

    In this order, so that the report of a refused config has it, too.
    """
    from ddp_lab.run.doctor import introduce, show

    usual, current = (dict(leaves(plain(each))) for each in (compose_config([], None), cfg))
    show(introduce(usual, current), env_int("RANK", 0) == 0)
    check(cfg)


def examine(cfg: DictConfig) -> None:
    """Examine the launch of this rank."""
    introduce_and_check(cfg)
    from ddp_lab.advise.fit import prepare_in_memory
    from ddp_lab.checkpoints.mirror import Mirror
    from ddp_lab.run.doctor import diagnose
    from ddp_lab.world.runtime import Runtime

    mirror = None
    if cfg.checkpoint.mirror:
        mirror = partial(Mirror, cfg.checkpoint.mirror, Path(cfg.runs_dir, cfg.name or "unnamed"))
    with Runtime(cfg.device, cfg.precision, cfg.timeout) as runtime:
        diagnose(runtime, partial(prepare_in_memory, cfg, runtime), mirror)


def examine_machines(cfg: DictConfig) -> None:
    """Examine the machines of this rank's launch, and the links between its ranks."""
    introduce_and_check(cfg)
    from ddp_lab.launchers.fabric.examine import Options, examine_fabric
    from ddp_lab.run.doctor import describe_backend, describe_devices, show
    from ddp_lab.world.runtime import Runtime

    with Runtime(cfg.device, cfg.precision, cfg.timeout) as runtime:
        show([describe_devices(), describe_backend(runtime)], runtime.local_rank == 0)
        examine_fabric(runtime, Options(Path(cfg.runs_dir), count_workers(cfg)))


def count_workers(cfg: DictConfig) -> int:
    """Return the number of worker processes of each rank that the config asks for.

    With data.loader=auto the datasets that are in memory are held by the device; that they fit
    there is assumed. data.num_workers=auto asks for none: it stays within the CPUs.
    """
    in_memory = str(cfg.data.dataset._target_).startswith("ddp_lab.data.datasets.")
    on_device = cfg.data.loader == "device" or (cfg.data.loader == "auto" and in_memory)
    chosen_by_run = cfg.data.num_workers == "auto"
    return 0 if on_device or chosen_by_run else cfg.data.num_workers
