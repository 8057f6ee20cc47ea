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

`ddp-lab` and `torchrun -m ddp_lab` are the same command, for any directory.
"""

import sys

from ddp_lab.commands.train import main_of_rank

if __name__ == "__main__":
    main_of_rank(sys.argv[1:])
