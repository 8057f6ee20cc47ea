"""Training and evaluation on several ranks, each on its part of every batch."""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from augment import augment, draw_offsets
from inputs import measure, model_inputs
from scratch import sum_gradients
from seeds import seed_of
from settings import (
    ACCUMULATE,
    BATCH_SIZE,
    CROP_PADDING,
    DEVICE,
    ENDS_WITHIN_EPOCH,
    FLIP,
    HAS_BUFFERS,
    MAX_GRAD_NORM,
    MAX_STEPS,
    MODEL_MAY_DRAW,
    SEED,
    STRATEGY,
    TASK,
)
from torch import Tensor, nn
from torch.utils.data import DistributedSampler


def connect() -> torch.device:
    """Connect the ranks that torchrun has started; return the device of this one."""
    if DEVICE == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    else:
        if not torch.cuda.is_available():
            dist.init_process_group("gloo")
            return torch.device("cpu")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
        return device


def batches(samples: int, batch_size: int, epoch=None) -> Iterator[tuple[Tensor, int, int]]:
    """Yield this rank's indices of each batch, how many are no padding, and the global size."""
    world_size = dist.get_world_size()
    assert batch_size % world_size == 0, "the ranks share every batch equally"
    sampler = DistributedSampler(range(samples), shuffle=epoch is not None, seed=SEED)
    sampler.set_epoch(epoch or 0)
    for number, index in enumerate(torch.tensor(list(sampler)).split(batch_size // world_size)):
        size = min(batch_size, samples - number * batch_size)
        yield index, len(range(dist.get_rank(), size, world_size)), size


def train_epoch(model, samples, epoch, optimizer, scheduler) -> Tensor:
    """Train for an epoch; return the sums of `measure` over all ranks."""
    model.train()
    inputs, targets = samples
    sums = torch.zeros(3, dtype=torch.float64, device=targets.device)
    if CROP_PADDING > 0 or FLIP:
        offsets = draw_offsets(len(inputs), epoch)
    for index, valid, size in batches(len(inputs), BATCH_SIZE, epoch):
        if MODEL_MAY_DRAW:
            step = scheduler.last_epoch
            torch.manual_seed(seed_of(f"masks seed={SEED} step={step} replica={dist.get_rank()}"))
        if TASK == "tokens":
            before = sums[2].clone()
        if ACCUMULATE > 1:
            parts = index.chunk(ACCUMULATE)
            for number, part in enumerate(parts):
                if STRATEGY == "ddp":
                    model.require_backward_grad_sync = number == len(parts) - 1
                if STRATEGY == "fsdp":
                    model.set_requires_gradient_sync(number == len(parts) - 1)
                batch = inputs[part]
                if CROP_PADDING > 0 or FLIP:
                    batch = augment(batch, offsets[:, part])
                counted = max(0, valid - number * len(parts[0]))
                logits = model(model_inputs(batch))
                loss, results = measure(logits[:counted], targets[part][:counted])
                (loss / size).backward()
                sums += results
        else:
            batch = inputs[index]
            if CROP_PADDING > 0 or FLIP:
                batch = augment(batch, offsets[:, index])
            logits = model(model_inputs(batch))
            loss, results = measure(logits[:valid], targets[index][:valid])
            (loss / size).backward()
            sums += results
        if STRATEGY == "scratch":
            sum_gradients(model)
        if TASK == "tokens":
            # the mean over the tokens of the global batch, which have been counted only now
            tokens = sums[2] - before
            dist.all_reduce(tokens)
            for parameter in model.parameters():
                parameter.grad *= size / tokens.item()
        if MAX_GRAD_NORM is not None:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if ENDS_WITHIN_EPOCH and scheduler.last_epoch == MAX_STEPS:
            break
    dist.all_reduce(sums)
    return sums


@torch.no_grad()
def evaluate(model: nn.Module, samples: tuple[Tensor, Tensor]) -> Tensor:
    """Return the sums of `measure` over all samples, each of which counts once."""
    model.eval()
    if HAS_BUFFERS:
        for buffer in model.buffers():  # BatchNorm's statistics, which differ between ranks
            dist.broadcast(buffer, src=0)
    inputs, targets = samples
    sums = torch.zeros(3, dtype=torch.float64, device=targets.device)
    micro_batch = -(-BATCH_SIZE // (dist.get_world_size() * ACCUMULATE))
    for index, valid, _ in batches(len(inputs), dist.get_world_size() * micro_batch):
        _, results = measure(model(model_inputs(inputs[index]))[:valid], targets[index][:valid])
        sums += results
    dist.all_reduce(sums)
    return sums
