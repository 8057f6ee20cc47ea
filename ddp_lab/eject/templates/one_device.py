"""Training and evaluation on one device."""

from collections.abc import Iterator

import torch
from augment import augment, draw_offsets
from inputs import measure, model_inputs
from seeds import seed_of
from settings import (
    ACCUMULATE,
    BATCH_SIZE,
    CROP_PADDING,
    ENDS_WITHIN_EPOCH,
    FLIP,
    MAX_GRAD_NORM,
    MAX_STEPS,
    MODEL_MAY_DRAW,
    SEED,
    TASK,
)
from torch import Tensor, nn


def batches(samples: int, epoch: int) -> Iterator[Tensor]:
    """Yield the indices of the samples of each batch, in the random order of an epoch."""
    generator = torch.Generator().manual_seed(SEED + epoch)
    order = torch.randperm(samples, generator=generator)
    yield from order.split(BATCH_SIZE)


def train_epoch(model, samples, epoch, optimizer, scheduler) -> Tensor:
    """Train for an epoch; return the sums of `measure`."""
    model.train()
    inputs, targets = samples
    sums = torch.zeros(3, dtype=torch.float64, device=targets.device)
    if CROP_PADDING > 0 or FLIP:
        offsets = draw_offsets(len(inputs), epoch)
    for index in batches(len(inputs), epoch):
        if MODEL_MAY_DRAW:
            step = scheduler.last_epoch
            torch.manual_seed(seed_of(f"masks seed={SEED} step={step} replica=0"))
        if TASK == "tokens":
            before = sums[2].item()
        if ACCUMULATE > 1:
            for part in index.chunk(ACCUMULATE):
                batch = inputs[part]
                if CROP_PADDING > 0 or FLIP:
                    batch = augment(batch, offsets[:, part])
                loss, results = measure(model(model_inputs(batch)), targets[part])
                (loss / len(index)).backward()
                sums += results
        else:
            batch = inputs[index]
            if CROP_PADDING > 0 or FLIP:
                batch = augment(batch, offsets[:, index])
            loss, results = measure(model(model_inputs(batch)), targets[index])
            (loss / len(index)).backward()
            sums += results
        if TASK == "tokens":
            # the mean over the tokens of the batch, which have been counted only now
            tokens = sums[2].item() - before
            for parameter in model.parameters():
                parameter.grad *= len(index) / tokens
        if MAX_GRAD_NORM is not None:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if ENDS_WITHIN_EPOCH and scheduler.last_epoch == MAX_STEPS:
            break
    return sums


@torch.no_grad()
def evaluate(model: nn.Module, samples: tuple[Tensor, Tensor]) -> Tensor:
    """Return the sums of `measure` over all samples."""
    model.eval()
    inputs, targets = samples
    sums = torch.zeros(3, dtype=torch.float64, device=targets.device)
    for index in torch.arange(len(inputs)).split(-(-BATCH_SIZE // ACCUMULATE)):
        _, results = measure(model(model_inputs(inputs[index])), targets[index])
        sums += results
    return sums
