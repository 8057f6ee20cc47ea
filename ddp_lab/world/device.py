"""The devices of this machine, the memory that this process has used, and their precision."""

import re
import resource
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager

import torch

from ddp_lab.config.errors import NodeError

# GiB as torch reports them; of the data sheets, without sparsity: TFLOP/s in TF32, and in bf16 and
# fp16, which no program reaches, and GB/s to the other GPUs of a machine by NVLink, else PCIe.
CARDS = {
    "B200": (178.4, 1125, 2250, 900),
    "H200": (139.8, 494, 989, 450),
    "H100": (79.1, 494, 989, 450),
    "A100-80": (79.1, 156, 312, 300),
    "A100-40": (39.4, 156, 312, 300),
    "L40S": (44.4, 183, 362, 32),
    "L4": (22.0, 60, 121, 32),
    "A10": (22.0, 62.5, 125, 32),
    "RTX4090": (23.5, 82.6, 165, 32),
    "RTX3090": (23.6, 35.6, 71, 32),
}


def list_devices() -> str:
    """Return a description of the devices of this machine, for messages."""
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = [
        f"cuda:{i} ({gpu.name}, {gpu.total_memory / 2**30:.0f} GiB)"
        for i, gpu in enumerate(properties)
    ]
    if torch.backends.mps.is_available():
        gpus.append("mps")
    return ", ".join(["cpu", *gpus]) + ("" if gpus else " (no GPU is visible)")


def find_device(name: str, key: str = "device") -> torch.device:
    """Return the device called `name`.

    Args:
        name: "cpu", "cuda", "cuda:N" or "mps".
        key: The config key that the error message is about.

    Raises:
        NodeError: This machine does not have the device.
    """
    kind, _, index = name.partition(":")
    number = int(index or 0)
    if kind == "cuda":
        available = number < torch.cuda.device_count()
    else:
        available = name == "cpu" or (name == "mps" and torch.backends.mps.is_available())
    if not available:
        raise NodeError(
            f"{key}={name}: there is no such device on {socket.gethostname()}. Available: "
            f"{list_devices()}"
        )
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, number)


def peak_memory_bytes() -> int:
    """Return the peak memory allocated on this process's fullest GPU.

    Without GPUs, return the peak resident size of the process.
    """
    if torch.cuda.is_initialized():
        return max(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def size(count: int) -> str:
    """Return a number of bytes for people."""
    units = {"GiB": 2**30, "MiB": 2**20}
    unit = next((name for name, least in units.items() if count >= least), "KiB")
    return f"{count / units.get(unit, 2**10):,.1f} {unit}"


def card_of(name: str) -> str | None:
    """Return the card in CARDS of a device, by the name that torch reports; None for others."""
    # NVIDIA A100-SXM4-40GB, NVIDIA GeForce RTX 4090
    words = re.split("[ -]", name.replace("RTX ", "RTX"))
    return next((card for card in CARDS if card.partition("-")[0] in words), None)


def half_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype of mixed precision; None with precision=float32."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def peak_flops(card: str | None, precision: str) -> float | None:
    """Return the FLOP/s of a card of CARDS by its data sheet; None if there is no card."""
    if card is None:
        return None
    column = 1 if half_dtype(precision) is None else 2
    return CARDS[card][column] * 1e12


@contextmanager
def float32_matmul(precision: str) -> Generator[None]:
    """Let float32 matrix multiplications use full precision ("highest"), or TF32 ("high").

    Only some GPUs have TF32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
