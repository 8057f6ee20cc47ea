"""Measurement of a card's constants, but for Python's (run/launching.py); on several ranks also of their connection."""

import platform
import statistics
from dataclasses import replace
from datetime import date

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp_lab.estimate.cards import GB, TERA, Card, GiB
from ddp_lab.estimate.constants import ASSUMED, Constants, MiB
from ddp_lab.estimate.rates import (
    Convolutions,
    attention,
    bandwidth,
    batch_norm,
    kernel_seconds,
    linear,
    matmul,
    pooling,
    reductions,
    seconds,
    strided,
)

# For tests: a CPU has no data sheet here. The fractions that it achieves of these peaks mean nothing.
CPU = Card("cpu", 8 * GiB, 20 * GB, 0.1 * TERA, 0.1 * TERA, 0.1 * TERA, 1 * GB, "cpu")


def measure_card(card: Card, device: torch.device) -> Constants:
    """Return the constants of a card.

    Assumed are those of Python, of the connection, and `fused`, because compiling kernels would take longer than all the rest.

    Args:
        card: its data sheet.
        device: where it is. No other program should use it.
    """
    large = device.type == "cuda"
    workspace, context = sizes_of_libraries(device) if large else (ASSUMED.workspace, ASSUMED.context)
    samples, tokens = 256 if large else 1, 50_000 if large else 4
    convolutions = [
        Convolutions(dtype, last, device, samples) for dtype in (torch.float32, torch.bfloat16) for last in (False, True)
    ]
    norms = [batch_norm(dtype, last, device, samples) for dtype in (torch.float32, torch.bfloat16) for last in (False, True)]
    return Constants(
        source=f"measured on {describe(device)}, torch {torch.__version__}, {date.today()}",
        context=context,
        workspace=workspace,
        communicator=ASSUMED.communicator,
        launch=ASSUMED.launch,
        step=ASSUMED.step,
        replay=replay_seconds(device) if large else ASSUMED.replay,
        start=statistics.mean(each.start for each in convolutions),
        float32=matmul(torch.float32, device, 8192 if large else 256) / card.float32,
        bf16=linear(device, tokens) / card.bf16,
        tf32=convolutions[0].rate / card.tf32,
        tf32_last=convolutions[1].rate / card.tf32,
        convolution=convolutions[2].rate / card.bf16,
        convolution_last=convolutions[3].rate / card.bf16,
        attention=attention(device, samples) / card.bf16,
        bandwidth=bandwidth(device, GiB if large else 16 * MiB) / card.bandwidth,
        strided=strided(device, samples) / card.bandwidth,
        reduction=reductions(device, tokens) / card.bandwidth,
        pooling=pooling(device, samples) / card.bandwidth,
        fused=ASSUMED.fused,
        batch_norm=norms[0] / card.bandwidth,
        batch_norm_last=norms[1] / card.bandwidth,
        batch_norm_bf16=norms[2] / card.bandwidth,
        batch_norm_bf16_last=norms[3] / card.bandwidth,
        link=ASSUMED.link,
        latency=ASSUMED.latency,
    )


def describe(device: torch.device) -> str:
    """Return the name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a CPU ({platform.machine()})"


def replay_seconds(device: torch.device, kernels: int = 200) -> float:
    """Return the seconds of a small convolution in a CUDA graph."""
    images, weight = torch.zeros(2, 8, 8, 8, device=device), torch.zeros(8, 8, 3, 3, device=device)
    return kernel_seconds(lambda: [F.conv2d(images, weight) for _ in range(kernels)], device, 10) / kernels


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


def measure_link(constants: Constants, card: Card, device: torch.device, free: int) -> Constants:
    """Return the constants with those of the connection of all ranks. Collective; it needs the process group.

    Args:
        constants: of `measure_card`.
        card, device: as above.
        free: free bytes of the card before the process group was opened.
    """
    ranks = dist.get_world_size()
    small = torch.zeros(1024, device=device)
    latency = seconds(lambda: dist.all_reduce(small), device, 20)
    taken = free - torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else ASSUMED.communicator
    large = torch.zeros((256 if device.type == "cuda" else 4) * MiB // 4, device=device)
    sent = 2 * (ranks - 1) / ranks * large.nbytes
    speed = sent / seconds(lambda: dist.all_reduce(large), device, 4)
    return replace(constants, latency=latency, link=speed / card.link, communicator=max(0, taken))
