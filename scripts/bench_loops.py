"""The training loops that scripts/bench.py measures train.py against."""

import itertools
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.world.device import peak_memory_bytes  # noqa: E402
from scripts.bench_layouts import Layout  # noqa: E402
from scripts.bench_models import LR, MODELS, Model, made_up  # noqa: E402
from scripts.bench_stock import STOCK, USUAL_SUMS, with_usual_sums  # noqa: E402

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
Step = Callable[[], Any]


def wrapped(model: nn.Module, device: torch.device, **options: Any) -> nn.Module:
    """Return the model in DistributedDataParallel, if there are several ranks."""
    if not dist.is_initialized():
        return model
    return DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None, **options
    )


def resident(model: Model, device: torch.device, arguments: Namespace) -> Batches:
    """Yield this rank's batches in a random order, gathered on the device and normalised."""
    images, targets = (
        tensor.to(device) for tensor in made_up(arguments.batch * min(arguments.steps, 50), model)
    )
    inputs = (images.float() / (255 * 0.5) - 1).to(
        torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    while True:
        for index in (
            torch.randperm(len(targets), generator=generator).to(device).split(arguments.batch)
        ):
            yield inputs[index], targets[index]


def stock(model: Model, device: torch.device, arguments: Namespace, mode: str | None) -> Step:
    """Return the step of an expert.

    Images on the device, bf16 and channels_last (float32 on a CPU), fused SGD.

    `mode` is that of torch.compile, for the forward pass and the loss; on several ranks for the
    model inside of DistributedDataParallel. None is eager mode.
    """
    cuda = device.type == "cuda"
    alone = not dist.is_initialized()
    torch.backends.cudnn.benchmark = True
    fuse: Callable[[Any], Any] = (
        partial(torch.compile, mode=mode) if mode else lambda function: function
    )
    plain = model.make().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.9, fused=cuda or None)
    module = wrapped(
        plain if alone else fuse(plain),
        device,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )
    batches = resident(model, device, arguments)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
            return F.cross_entropy(module(inputs), targets)

    forward = fuse(loss_of) if alone else loss_of

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        forward(inputs, targets).backward()
        optimizer.step()

    return step


def bare(model: Model, device: torch.device, arguments: Namespace) -> Step:
    """Return a step in eager mode and float32 on images on the device.

    It has the kernels of `ours eager` and nothing else: this rank's batches of the same samples,
    gathered in the same way, and gradients that are views of DDP's buckets.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    samples = arguments.batch * min(arguments.steps, 50) * ranks
    images, targets = (tensor.to(device) for tensor in made_up(samples, model))
    scale = torch.tensor(1 / (255 * 0.5), device=device)
    shift = torch.tensor(1.0, device=device)
    module = wrapped(
        model.make().to(device), device, broadcast_buffers=False, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    places = torch.randperm(samples)[rank::ranks].to(device)
    order = itertools.cycle(places.split(arguments.batch))

    def step() -> None:
        index = next(order)
        wanted = targets.index_select(0, index)  # on a CPU ten times as fast as targets[index]
        logits = module(images.index_select(0, index) * scale - shift)
        loss = F.cross_entropy(logits, wanted, reduction="sum")
        (loss / len(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
        correct = (logits.argmax(1) == wanted).sum()
        totals.add_(
            torch.stack(
                [
                    loss.detach().double(),
                    correct.double(),
                    torch.full_like(loss, len(index)).double(),
                ]
            )
        )

    return step


LOOPS: dict[str, Callable[[Model, torch.device, Namespace], Step]] = {
    "bare": bare,
    "stock eager": partial(stock, mode=None),
    "stock overhead": partial(stock, mode="reduce-overhead"),
}


def wait(device: torch.device) -> None:
    """Wait for the device and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def main(arguments: Namespace) -> None:
    """Run one loop on this rank and, on rank 0, write what it measured.

    That is the samples or tokens per second of each repeat, but for the first one, which compiles,
    and the peak memory in bytes of the rank that needs the most.
    """
    rank = int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", rank) if arguments.gpus else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if arguments.gpus else "gloo")
    torch.manual_seed(0)
    model = MODELS[arguments.model]
    arguments.layout = Layout(**arguments.layout)
    if arguments.loop == USUAL_SUMS:
        model = replace(model, make=partial(with_usual_sums, model.make))
    loop = LOOPS.get(arguments.loop, STOCK[arguments.strategy])
    step = loop(model, device, arguments)
    rates: list[float] = []
    for _ in range(arguments.repeats + 1):
        wait(device)
        start = time.perf_counter()
        for _ in range(arguments.steps):
            step()
        wait(device)
        seconds = time.perf_counter() - start
        rates.append(arguments.steps * arguments.batch * ranks * model.units / seconds)
    peak = torch.tensor(peak_memory_bytes(), device=device)
    if ranks > 1:
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    if rank == 0:
        measured = {"rates": rates[1:], "peak": int(peak)}
        Path(arguments.out).write_text(json.dumps(measured))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Namespace(**json.loads(sys.argv[1])))
