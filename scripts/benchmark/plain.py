"""Loops as the tutorials write them: eager mode, images from a DataLoader; and the same step on images on the device."""

import itertools
import time
from argparse import Namespace
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler
from torchvision.transforms.functional import to_tensor

from ddp_lab.data.datasets import Synthetic
from ddp_lab.world.runtime import Runtime

LR = 1e-4  # so low that the weights hardly change: with dead ReLUs or denormal numbers a CPU takes longer


class Pictures(Dataset):
    """PIL images that are converted to tensors one by one, like those of torchvision's datasets."""

    def __init__(self, size: int):
        self.images, self.targets = Synthetic(size, 1, 1, 28, 10).load().train

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return to_tensor(Image.fromarray(self.images[index, 0].numpy())), self.targets[index].item()


def repeated(step: Callable[[], None], arguments: Namespace, runtime: Runtime) -> Iterator[float]:
    """Time `arguments.steps` calls of `step` repeatedly, and yield samples per second over all ranks."""
    samples = arguments.batch * runtime.world_size
    while True:
        wait(runtime.device)
        start = time.perf_counter()
        for _ in range(arguments.steps):
            step()
        wait(runtime.device)
        yield arguments.steps * samples / (time.perf_counter() - start)


def wait(device: torch.device) -> None:
    """Wait for the device and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def loader_of(arguments: Namespace, ranks: int, distributed: bool) -> DataLoader:
    """Return a DataLoader of enough batches for all repeats; of this rank's share of them if `distributed`."""
    pictures = Pictures(10_000)
    many = arguments.batch * ranks * arguments.steps * (arguments.repeats + 2)
    sampler = RandomSampler(pictures, replacement=True, num_samples=many // ranks if distributed else many)
    workers = {"num_workers": arguments.workers, "pin_memory": torch.cuda.is_available()}
    return DataLoader(pictures, batch_size=arguments.batch, sampler=sampler, **workers)


def tutorial(model: nn.Module, runtime: Runtime, arguments: Namespace) -> Iterator[float]:
    """Train with DistributedDataParallel in float32, with `loss.item()` at every step."""
    device, ranks = runtime.device, runtime.world_size
    model = model.to(device)
    if ranks > 1:
        model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    batches = iter(loader_of(arguments, ranks, distributed=True))
    running = 0.0

    def step() -> None:
        nonlocal running
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in next(batches))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        running += loss.item()

    return repeated(step, arguments, runtime)


def bare(model: nn.Module, runtime: Runtime, arguments: Namespace) -> Callable[[], None]:
    """Return a step in eager mode and float32 on images on the device: the kernels of `ours eager` and nothing else."""
    device, ranks = runtime.device, runtime.world_size
    split = Synthetic(arguments.batch * ranks * arguments.steps, 1, 1, 28, 10).load().train
    images, targets = (tensor.to(device) for tensor in split)
    scale, shift = torch.tensor(1 / (255 * 0.5), device=device), torch.tensor(1.0, device=device)
    model = model.to(device)
    if ranks > 1:
        ids = [device] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    sampler = DistributedSampler(range(len(targets)), ranks, runtime.rank)
    order = itertools.cycle(torch.tensor(list(sampler), device=device).split(arguments.batch))

    def step() -> None:
        index = next(order)
        wanted = targets[index]
        logits = model(images[index] * scale - shift)
        loss = F.cross_entropy(logits, wanted, reduction="sum")
        (loss / arguments.batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        correct = (logits.argmax(1) == wanted).sum()
        totals.add_(torch.stack([loss.detach().double(), correct.double(), wanted.numel() * torch.ones_like(loss).double()]))

    return step
