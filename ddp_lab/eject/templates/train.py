"""The run."""

import math

import torch
import torch.distributed as dist
from cosine import lr_factor
from ddp import distribute
from digits import load_data
from fsdp import shard
from hold_out import hold_out
from inputs import describe, model_inputs
from lenet import build_model
from one_device import evaluate, train_epoch
from ranks import connect
from scratch import broadcast_weights
from settings import (
    BATCH_SIZE,
    DEVICE,
    ENDS_WITHIN_EPOCH,
    EPOCHS,
    EVALUATE_TEST,
    LR,
    MATMUL,
    MAX_STEPS,
    OPTIMIZER,
    SCHEDULE,
    SEED,
    STRATEGY,
    VAL_FRACTION,
    WEIGHTS,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim.lr_scheduler import LambdaLR


def main() -> None:
    """Train the model, and print the losses of each epoch."""
    if MATMUL == "high":
        torch.set_float32_matmul_precision("high")
    if STRATEGY != "single":
        device = connect()
    elif DEVICE == "cpu":
        device = torch.device("cpu")
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    sets = load_data()
    if VAL_FRACTION > 0:
        sets = hold_out(sets)
    sets = {
        name: (inputs.to(device), targets.to(device)) for name, (inputs, targets) in sets.items()
    }

    torch.manual_seed(SEED)
    model = build_model().to(device)
    if STRATEGY == "scratch":
        broadcast_weights(model)
    if STRATEGY == "ddp":
        model = distribute(model, model_inputs(sets["train"][0][:2]))
    if STRATEGY == "fsdp":
        shard(model, device.type)

    if OPTIMIZER == "two groups":
        # biases and the weights of normalization layers do not decay
        parameters = list(model.parameters())
        groups = [
            {"params": [each for each in parameters if each.dim() > 1]},
            {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=LR)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    if SCHEDULE == "multi_step":
        steps_per_epoch = math.ceil(len(sets["train"][0]) / BATCH_SIZE)
        scheduler = LambdaLR(optimizer, lambda step: lr_factor(step, steps_per_epoch))
    else:
        if ENDS_WITHIN_EPOCH:
            steps = MAX_STEPS
        else:
            steps = EPOCHS * math.ceil(len(sets["train"][0]) / BATCH_SIZE)
        scheduler = LambdaLR(optimizer, lambda step: lr_factor(step, steps))

    for epoch in range(1, EPOCHS + 1):
        lines = [describe("train", train_epoch(model, sets["train"], epoch, optimizer, scheduler))]
        for name in sets:
            if EVALUATE_TEST == "end":
                is_due = name == "val" or (name == "test" and epoch == EPOCHS)
                if is_due:
                    lines.append(describe(name, evaluate(model, sets[name])))
            else:
                if name != "train":
                    lines.append(describe(name, evaluate(model, sets[name])))
        if STRATEGY == "single" or dist.get_rank() == 0:
            print(f"epoch {epoch}: {' | '.join(lines)}", flush=True)

    if STRATEGY == "single":
        torch.save(model.state_dict(), WEIGHTS)
    elif STRATEGY == "fsdp":
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)  # of all ranks, on rank 0
        if dist.get_rank() == 0:
            torch.save(weights, WEIGHTS)
    elif dist.get_rank() == 0:
        if STRATEGY == "ddp":
            torch.save(model.module.state_dict(), WEIGHTS)
        else:
            torch.save(model.state_dict(), WEIGHTS)
    if STRATEGY != "single":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
