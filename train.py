"""Train one model with one strategy.

python train.py                                                 one device
torchrun --nproc_per_node=4 train.py strategy=ddp               four ranks: GPUs, or the CPU
torchrun --nproc_per_node=2 train.py strategy=scratch data=fashion_mnist model=resnet18
python train.py strategy=dp                                     one process, all GPUs
python train.py strategy=split                                  one process, the blocks on all GPUs
torchrun --nproc_per_node=4 train.py strategy=pipeline          a stage of the model on each rank
torchrun --nproc_per_node=4 train.py strategy=ddp_pipeline      two pipelines of two ranks
torchrun --nproc_per_node=2 train.py strategy=tp                the units of every layer sharded
torchrun --nproc_per_node=4 train.py strategy=fsdp              all state of training sharded
python train.py name=mine epochs=60                             resumes runs/mine if it exists
python train.py --help                                          every group and key

`ddp-lab` and `torchrun -m ddp_lab` are the same command, for any directory.
"""

import sys

from ddp_lab.commands.train import main_of_rank

if __name__ == "__main__":
    main_of_rank(sys.argv[1:])
