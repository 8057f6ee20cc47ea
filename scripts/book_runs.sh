#!/usr/bin/env bash
# Run the experiments of Dive into Deep Learning on the visible GPUs, with the given overrides of train.py:
#   scripts/book_runs.sh data.root=/path
set -euo pipefail
cd "$(dirname "$0")/.."
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
first() { seq -s, 0 $(($1 - 1)); }  # 3 -> 0,1,2

for n in 1 2; do
    [ "$n" -le "$gpus" ] || continue
    torchrun --standalone --nproc_per_node="$n" train.py experiment=book_lenet name="book_lenet-$n" "$@"
done
for n in 1 2 4; do
    [ "$n" -le "$gpus" ] || continue
    CUDA_VISIBLE_DEVICES=$(first "$n") python3 train.py experiment=book_resnet18 name="book_resnet18-$n" "$@"
done
python3 train.py experiment=simple_cnn name=simple_cnn "$@"
# How much micro-batches let the stages of strategy=split overlap: seconds per epoch for 1 to 16 of them.
if [ "$gpus" -ge 2 ]; then
    for m in 1 2 4 8 16; do
        CUDA_VISIBLE_DEVICES=0,1 python3 train.py strategy=split strategy.num_microbatches="$m" model=resnet18 data=fashion_mnist \
            batch_size=4096 epochs=3 name="split-$m" "$@"
    done
fi
