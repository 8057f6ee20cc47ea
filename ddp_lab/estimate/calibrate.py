"""Measurement of the constants on a card of this machine, in about ten seconds; on several ranks also of their connection."""

import copy
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_lab.estimate.cards import GB, TERA, Card, GiB
from ddp_lab.estimate.constants import ASSUMED, Constants, MiB
from ddp_lab.estimate.recorder import Recorder

# For tests: a CPU has no data sheet here. The fractions that it achieves of these peaks mean nothing.
CPU = Card("cpu", 8 * GiB, 20 * GB, 0.1 * TERA, 0.1 * TERA, 0.1 * TERA, 1 * GB, "cpu")
RESNET = ((64, 28), (128, 14), (256, 7), (512, 4))  # channels and image sizes of a ResNet-18's convolutions at 28x28 pixels
LAYERS = 6  # of each kind in the network whose launches are timed
STEP = ASSUMED.step / ASSUMED.launch  # a step's own Python, in launches


def seconds(run: Callable[[], object], device: torch.device, repeat: int) -> float:
    """Return the seconds of a call: the shortest mean of three rounds, after a first round that does not count."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    rounds = list[float]()
    for _ in range(4):
        wait()
        start = time.perf_counter()
        for _ in range(repeat):
            run()
        wait()
        rounds.append((time.perf_counter() - start) / repeat)
    return min(rounds[1:])


def measure_card(card: Card, device: torch.device) -> Constants:
    """Return the constants of a card; those of the connection are assumed.

    Args:
        card: its data sheet.
        device: where it is. No other program should use it.
    """
    large = device.type == "cuda"
    workspace, context = sizes_of_libraries(device) if large else (ASSUMED.workspace, ASSUMED.context)
    launch, samples = launch_seconds(device), 256 if large else 2
    return Constants(
        source=f"measured on {describe(device)}, torch {torch.__version__}, {date.today()}",
        context=context,
        workspace=workspace,
        communicator=ASSUMED.communicator,
        launch=launch,
        step=STEP * launch,
        replay=replay_seconds(device) if large else ASSUMED.replay,
        float32=matmul(torch.float32, device, 8192 if large else 256) / card.float32,
        bf16=matmul(torch.bfloat16, device, 8192 if large else 128) / card.bf16,
        tf32=convolutions(torch.float32, False, device, samples) / card.tf32,
        tf32_last=convolutions(torch.float32, True, device, samples) / card.tf32,
        convolution=convolutions(torch.bfloat16, False, device, samples) / card.bf16,
        convolution_last=convolutions(torch.bfloat16, True, device, samples) / card.bf16,
        attention=attention(device, samples) / card.bf16,
        bandwidth=bandwidth(device, GiB if large else 16 * MiB) / card.bandwidth,
        reduction=reductions(device, 512 * samples) / card.bandwidth,
        link=ASSUMED.link,
        latency=ASSUMED.latency,
    )


def describe(device: torch.device) -> str:
    """Return the name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a CPU ({platform.machine()})"


def matmul(dtype: torch.dtype, device: torch.device, size: int) -> float:
    """Return the FLOP/s of multiplying two square matrices."""
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: one @ other, device, 4)


def convolutions(dtype: torch.dtype, last: bool, device: torch.device, samples: int) -> float:
    """Return the FLOP/s of a ResNet's convolutions, forward and backward, one of each width. cuDNN uses TF32 for float32.

    Args:
        last: whether their memory format is channels_last.
        samples: number of images of 28x28 pixels.
    """
    kind = torch.channels_last if last else torch.contiguous_format
    flops = taken = 0.0
    for channels, size in RESNET:
        images, gradient = (
            torch.randn(samples, channels, size, size, device=device).to(dtype=dtype, memory_format=kind) for _ in range(2)
        )
        weight = torch.randn(channels, channels, 3, 3, device=device).to(dtype=dtype, memory_format=kind)
        taken += seconds(partial(forward_backward, partial(F.conv2d, padding=1), (images, weight), gradient), device, 2)
        flops += 3 * 2 * 9 * samples * size * size * channels * channels
    return flops / taken


def forward_backward(run: Callable[..., torch.Tensor], given: Sequence[torch.Tensor], gradient: torch.Tensor) -> None:
    """Run a function and compute the gradients of what it is given."""
    given = [tensor.requires_grad_() for tensor in given]
    torch.autograd.grad(run(*given), given, gradient)


def attention(device: torch.device, samples: int) -> float:
    """Return the FLOP/s of attention in bf16, forward and backward, of a ViT-B/16 on images of 224 pixels."""
    heads, tokens, width = 12, 196, 64
    query, key, value, gradient = (
        torch.randn(samples, heads, tokens, width, device=device, dtype=torch.bfloat16) for _ in range(4)
    )
    taken = seconds(partial(forward_backward, F.scaled_dot_product_attention, (query, key, value), gradient), device, 2)
    return (4 + 10) * samples * heads * tokens**2 * width / taken  # as `flops_of` counts


def reductions(device: torch.device, rows: int) -> float:
    """Return the bytes per second that normalizations, forward and backward, and the gradients of biases read and write."""
    width = 768
    values, gradient = (torch.randn(rows, width, device=device) for _ in range(2))
    weight, bias = torch.ones(width, device=device), torch.zeros(width, device=device)
    norm = lambda values, weight, bias: F.layer_norm(values, (width,), weight, bias)  # noqa: E731
    taken = seconds(partial(forward_backward, norm, (values, weight, bias), gradient), device, 2)
    taken += seconds(lambda: gradient.sum(0), device, 2)
    return 6 * values.nbytes / taken  # read and written; read twice and written; read


def bandwidth(device: torch.device, nbytes: int) -> float:
    """Return the bytes per second that an elementwise operation reads and writes."""
    values = torch.zeros(nbytes // 4, device=device)
    return 2 * nbytes / seconds(lambda: values.add_(1), device, 4)


def launch_seconds(device: torch.device) -> float:
    """Return the seconds of an operation in eager mode, forward and backward, whose computation takes no time."""
    kinds = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()
    network = nn.Sequential(*(copy.deepcopy(kind) for _ in range(LAYERS) for kind in kinds)).to(device)
    inputs = torch.zeros(2, 8, 8, 8, device=device)

    def step() -> None:
        network(inputs).sum().backward()
        network.zero_grad()

    with Recorder() as recorder:
        step()
    return seconds(step, device, 20) / len(recorder.operations)


def replay_seconds(device: torch.device, kernels: int = 1000) -> float:
    """Return the seconds of a tiny kernel in a CUDA graph."""
    values, graph = torch.zeros(8, device=device), torch.cuda.CUDAGraph()
    values.add_(1)
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        for _ in range(kernels):
            values.add_(1)
    return seconds(graph.replay, device, 10) / kernels


def sizes_of_libraries(device: torch.device) -> tuple[float, float]:
    """Return the bytes that cuBLAS allocates through torch, and those that the CUDA context and the kernels take."""
    one, images = torch.zeros(256, 256, device=device), torch.zeros(8, 16, 32, 32, device=device)
    before = torch.cuda.memory_allocated(device)
    result = one @ one
    workspace = torch.cuda.memory_allocated(device) - before - result.nbytes
    F.conv2d(images, torch.zeros(16, 16, 3, 3, device=device))
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return workspace, total - free - torch.cuda.memory_reserved(device)


def measure_link(constants: Constants, card: Card, device: torch.device) -> Constants:
    """Return the constants with those of the connection of all ranks. Collective; it needs the process group.

    Args:
        constants: of `measure_card`.
        card, device: as above.
    """
    ranks = dist.get_world_size()
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    small = torch.zeros(1024, device=device)
    latency = seconds(lambda: dist.all_reduce(small), device, 20)
    taken = free - torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else ASSUMED.communicator
    large = torch.zeros((256 if device.type == "cuda" else 4) * MiB // 4, device=device)
    sent = 2 * (ranks - 1) / ranks * large.nbytes
    speed = sent / seconds(lambda: dist.all_reduce(large), device, 4)
    return replace(constants, latency=latency, link=speed / card.link, communicator=max(0, taken))
