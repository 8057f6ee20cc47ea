"""Train one model with one strategy, from any directory. train.py calls it.

ddp-lab train model=resnet18 data=cifar10
torchrun --standalone --nproc_per_node=2 -m ddp_lab strategy=ddp
"""

import sys

import hydra
from omegaconf import DictConfig

from ddp_lab.config.check import check
from ddp_lab.launch.command_line import CONF, record, user_errors

PREEMPTED = 75  # exit code: EX_TEMPFAIL of sysexits.h, temporary failure, try again later


@record
@user_errors
@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
@user_errors
def main(cfg: DictConfig) -> float | None:
    check(cfg)
    # These imports are not at the top of the file: they load torch, which takes 1.5 s and is not needed for --help or for
    # most config errors.
    from ddp_lab.observe.metrics_file import objective
    from ddp_lab.resilience.watchdog import COLLECTIVE_GRACE
    from ddp_lab.run.train import train
    from ddp_lab.world.runtime import Runtime

    with Runtime(cfg.device, cfg.precision, cfg.timeout + COLLECTIVE_GRACE) as runtime:
        status, run_dir = train(cfg, runtime)  # after it returns, no object refers to the process group
    # Under torchrun a non-zero exit code would restart the ranks.
    code = PREEMPTED if status == "preempted" and not runtime.under_torchrun else 0
    runtime.exit_if_abandoned(code)
    if code:
        sys.exit(code)
    return objective(run_dir / "metrics.jsonl", cfg.optimize)[1]  # for a Hydra sweeper
