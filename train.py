"""Train one model with one strategy.

python train.py                                                       one device
torchrun --nproc_per_node=4 train.py strategy=ddp                     four ranks: a GPU each, or all on the CPU
torchrun --nproc_per_node=2 train.py strategy=scratch data=fashion_mnist model=resnet18
python train.py strategy=dp                                           one process, all GPUs
python train.py strategy=split                                        one process, the model's blocks distributed over all GPUs
torchrun --nproc_per_node=4 train.py strategy=pipeline                a stage of the model on each rank
torchrun --nproc_per_node=4 train.py strategy=ddp_pipeline            two pipelines of two ranks (strategy.pp=2)
torchrun --nproc_per_node=2 train.py strategy=tp                      every layer's channels and units, sharded over the ranks
torchrun --nproc_per_node=4 train.py strategy=fsdp                    parameters, gradients and optimizer state sharded
python train.py name=mine epochs=60                                   resumes runs/mine if it exists
python train.py --help                                                every group and key
"""

import sys

import hydra
from omegaconf import DictConfig

from ddp_lab.config.check import check
from ddp_lab.launch.command_line import record, user_errors

PREEMPTED = 75  # exit code: EX_TEMPFAIL of sysexits.h, temporary failure, try again later


@record
@user_errors
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
@user_errors
def main(cfg: DictConfig) -> None:
    check(cfg)
    # These imports are not at the top of the file: they load torch, which takes 1.5 s and is not needed for --help or for
    # most config errors.
    from ddp_lab.resilience.watchdog import COLLECTIVE_GRACE
    from ddp_lab.run.train import train
    from ddp_lab.world.runtime import Runtime

    with Runtime(cfg.device, cfg.precision, cfg.timeout + COLLECTIVE_GRACE) as runtime:
        status = train(cfg, runtime)  # after it returns, no object refers to the process group
    if status == "preempted" and not runtime.under_torchrun:
        sys.exit(PREEMPTED)  # under torchrun a non-zero exit code would restart the ranks


if __name__ == "__main__":
    main()
