#!/usr/bin/env bash
# The speed of every strategy on the same work, for docs/log/strategies.md: ResNet-18, made-up 28x28 images, global batch 1024,
# float32, on one GPU and on four.
#   scripts/compare_strategies.sh [folder for the runs]
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${1:-runs/strategies}
work=(model=resnet18 data=synthetic data.dataset.channels=1 data.dataset.train_size=20480 data.dataset.test_size=1024
    batch_size=1024 epochs=4 "runs_dir=$runs")

one() { python train.py "${work[@]}" "name=$1" "strategy=$1" | tail -1; }
four() { torchrun --standalone --nproc_per_node=4 train.py "${work[@]}" "name=$1" "strategy=${1%%-*}" "${@:2}" | tail -1; }

CUDA_VISIBLE_DEVICES=0 one single
one dp
one split
four scratch
four ddp
four fsdp
four pipeline strategy.num_microbatches=8
four ddp_pipeline strategy.num_microbatches=8
four tp-2 strategy.tp=2
four tp-4 strategy.plan={head:replicate}
