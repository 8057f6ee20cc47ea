"""Measured times of a model's blocks, which a pipeline is cut by with `strategy.balance=time`.

FLOPs are not time: the early layers of a ResNet are bound by memory traffic. Rank 0 measures every kind of block alone, with
random weights and inputs, and all ranks get its times. A file in the run directory keeps them, so that a restart and a resume
cut the model at the same places.
"""

import copy
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from ddp_lab.models.chain import Chain
from ddp_lab.models.partition import Partition
from ddp_lab.observe.log import log
from ddp_lab.strategies.compilation import kind
from ddp_lab.world.runtime import Runtime

Balance = Literal["flops", "time"]
WARM_UP, STEPS = 3, 7  # calls of a block before the measurement, and in it


def cut_by_time(parts: Partition, model: Chain, size: int, runtime: Runtime, device: torch.device, path: Path | None) -> None:
    """Cut the model into stages of about equal times, which are measured unless the file has them. Collective; logs the times.

    Args:
        parts: the partition to change.
        model: the complete model, which stays as it is.
        size: samples in a micro-batch.
        runtime: whose rank 0 measures.
        device: where it does.
        path: the file that keeps the times; None: none does.
    """
    kinds = hashlib.sha256(repr([kind(block) for block in model]).encode()).hexdigest()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    key = {"model": kinds, "micro-batch": str(size), "device": where, "precision": runtime.precision}
    measure = partial(block_times, model, parts.shapes, size, runtime, device)
    times = runtime.agree("block times", partial(known_times, path, key, measure))
    log_times(parts.names, times)
    parts.cut_by_time(times)


def block_times(chain: Chain, shapes: Sequence[torch.Size], size: int, runtime: Runtime, device: torch.device) -> list[int]:
    """Measure forward and backward of each block on a device. Blocks of one kind are measured once.

    Args:
        chain: the complete model, which may be on the meta device.
        shapes: shape of one sample's activation before each block, without the batch dimension.
        size: samples in a micro-batch.
        runtime: provides the precision.
        device: the device, which has room for the largest block and its activations.

    Returns:
        Nanoseconds of each block: the median of several calls.
    """
    times: dict[Hashable, int] = {}
    taken: list[int] = []
    for index, (block, shape) in enumerate(zip(chain, shapes, strict=False)):
        key = kind(block), shape
        if key not in times:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                inputs = torch.randn(size, *shape, device=device, requires_grad=index > 0)
                times[key] = time_of(with_random_weights(block, device), inputs, runtime)
        taken.append(times[key])
    return taken


def with_random_weights(block: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a block on a device, in training mode. It has random weights, and 1 in its other tensors."""
    block = copy.deepcopy(block).to_empty(device=device).train()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    for buffer in block.buffers():
        buffer.fill_(1)
    return block


def time_of(block: nn.Module, inputs: torch.Tensor, runtime: Runtime) -> int:
    """Return the median time of forward and backward of a block, in nanoseconds."""

    def now() -> int:
        if inputs.device.type == "cuda":
            torch.cuda.synchronize(inputs.device)
        return time.perf_counter_ns()

    taken: list[int] = []
    for _ in range(WARM_UP + STEPS):
        start = now()
        with runtime.autocast():
            outputs = block(inputs)
        if outputs.requires_grad:  # a frozen first block has no backward pass
            outputs.backward(torch.ones_like(outputs))
        taken.append(now() - start)
    return round(statistics.median(taken[WARM_UP:]))


def known_times(path: Path | None, key: dict[str, str], measure: Callable[[], list[int]]) -> list[int]:
    """Return the times in a file, if it was written for the same work, or else measure them and write the file.

    A damaged file is reported and replaced.

    Args:
        path: the file; None: none is read or written.
        key: what the times depend on.
        measure: returns the times.
    """
    if path is not None and path.exists():
        try:
            known = json.loads(path.read_text())
            if known["key"] == key:
                return [int(taken) for taken in known["nanoseconds"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            log.warning(f"{path} is damaged ({reason}). The blocks are measured again; the cut may differ from the one before")
    times = measure()
    if path is not None:
        written = path.with_suffix(".partial")
        written.write_text(json.dumps({"key": key, "nanoseconds": times}))
        written.replace(path)
    return times


def log_times(names: Sequence[str], times: Sequence[int]) -> None:
    """Log the time of each block, once for consecutive blocks with the same one."""
    runs: list[tuple[list[str], int]] = []
    for name, taken in zip(names, times, strict=True):
        if runs and runs[-1][1] == taken:
            runs[-1][0].append(name)
        else:
            runs.append(([name], taken))
    texts = [
        f"{own[0]}{f' .. {own[-1]}' if len(own) > 1 else ''} {taken / 1e6:.3g} ms{' each' if len(own) > 1 else ''}"
        for own, taken in runs
    ]
    log.info(f"strategy.balance=time: forward and backward of a micro-batch take {', '.join(texts)}")
