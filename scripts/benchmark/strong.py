"""Strong loops that are not ours: what an expert writes with stock torch, Accelerate or Lightning Fabric.

All have the same options: the images on the device, normalised beforehand; bf16, channels_last, cuDNN's benchmark mode and
fused SGD on a GPU (float32 on a CPU, where bf16 is slower). `mode` is that of torch.compile: None is eager mode, "default", or
"reduce-overhead", which replays CUDA graphs.
"""

import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from benchmark.plain import loader_of, repeated
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lab.data.datasets import Synthetic
from ddp_lab.world.runtime import Runtime

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def resident(runtime: Runtime, arguments: Namespace) -> Batches:
    """Yield this rank's batches, gathered on the device from normalised images, in a random order."""
    device, cuda = runtime.device, runtime.device.type == "cuda"
    images, targets = Synthetic(arguments.batch * arguments.steps, 1, 1, 28, 10).load().train
    inputs = (images.to(device).float() / (255 * 0.5) - 1).to(torch.bfloat16 if cuda else torch.float32)
    inputs, targets = inputs.contiguous(memory_format=torch.channels_last), targets.to(device)
    generator = torch.Generator().manual_seed(runtime.rank)
    while True:
        for index in torch.randperm(len(targets), generator=generator).to(device).split(arguments.batch):
            yield inputs[index], targets[index]


def prepared(model: nn.Module, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model in its fastest memory format on the device, and its optimizer."""
    torch.backends.cudnn.benchmark = True
    model = model.to(device, memory_format=torch.channels_last)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=device.type == "cuda" or None)


def stock(model: nn.Module, runtime: Runtime, arguments: Namespace, mode: str | None, inside: bool = False) -> Iterator[float]:
    """Train with torch alone.

    Args:
        model: on the CPU.
        runtime: of this rank.
        arguments: of the command line.
        mode: of torch.compile, for the forward pass and the loss.
        inside: on several ranks, compile the model inside of DistributedDataParallel instead of around it.
    """
    device, cuda = runtime.device, runtime.device.type == "cuda"
    model, optimizer = prepared(model, device)
    fuse = partial(torch.compile, mode=mode) if mode else lambda function: function
    if runtime.world_size > 1:
        ids = [device] if cuda else None
        module = fuse(model) if inside else model
        model = DistributedDataParallel(module, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True)
    batches = resident(runtime, arguments)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
            return F.cross_entropy(model(inputs), targets)

    forward = loss_of if inside and runtime.world_size > 1 else fuse(loss_of)
    return repeated(partial(plain_step, forward, optimizer, batches, torch.Tensor.backward), arguments, runtime)


def plain_step(
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    backward: Callable[[torch.Tensor], None],
) -> None:
    """Take one step as in the guides of torch, Accelerate and Fabric."""
    inputs, targets = next(batches)
    optimizer.zero_grad()
    backward(loss_of(inputs, targets))
    optimizer.step()


def cross_entropy_of(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss of a model whose library casts its inputs."""
    return lambda inputs, targets: F.cross_entropy(model(inputs), targets)


def accelerate(model: nn.Module, runtime: Runtime, arguments: Namespace, strong: bool, mode: str | None) -> Iterator[float]:
    """Train with Hugging Face Accelerate, bf16; with the same options as `stock` if `strong`."""
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    dynamo = TorchDynamoPlugin(backend="inductor", mode=mode) if mode else None
    helper = Accelerator(mixed_precision="bf16" if runtime.device.type == "cuda" else "no", dynamo_plugin=dynamo)
    if strong:
        model, optimizer = helper.prepare(*prepared(model, runtime.device))
        batches = resident(runtime, arguments)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        loader = loader_of(arguments, runtime.world_size, distributed=False)
        model, optimizer, loader = helper.prepare(model, optimizer, loader)
        batches = iter(loader)
    return repeated(partial(plain_step, cross_entropy_of(model), optimizer, batches, helper.backward), arguments, runtime)


def fabric(model: nn.Module, runtime: Runtime, arguments: Namespace, strong: bool, mode: str | None) -> Iterator[float]:
    """Train with Lightning Fabric, bf16; with the same options as `stock` if `strong`."""
    from lightning_fabric import Fabric

    cuda, ranks = runtime.device.type == "cuda", runtime.world_size
    helper = Fabric(
        accelerator="cuda" if cuda else "cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        precision="bf16-mixed" if cuda else "32-true",
    )
    helper.launch()
    if strong:
        model, optimizer = prepared(model, runtime.device)
        model, optimizer = helper.setup(torch.compile(model, mode=mode) if mode else model, optimizer)
        batches = resident(runtime, arguments)
    else:
        model, optimizer = helper.setup(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        loader = loader_of(arguments, ranks, distributed=True)
        batches = itertools.chain(helper.setup_dataloaders(loader, use_distributed_sampler=False))
    return repeated(partial(plain_step, cross_entropy_of(model), optimizer, batches, helper.backward), arguments, runtime)
