"""The devices of this machine, and the memory that this process has used of them."""

import resource
import socket
import sys

import torch

from ddp_lab.config.errors import NodeError


def list_devices() -> str:
    """Return a description of the devices of this machine, for messages."""
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = [f"cuda:{i} ({gpu.name}, {gpu.total_memory / 2**30:.0f} GiB)" for i, gpu in enumerate(properties)]
    gpus += ["mps"] if torch.backends.mps.is_available() else []
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
        raise NodeError(f"{key}={name}: there is no such device on {socket.gethostname()}. Available: {list_devices()}")
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, number)


def peak_memory_bytes() -> int:
    """Return the peak memory allocated on this process's fullest GPU; without GPUs, the peak resident size of the process."""
    if torch.cuda.is_initialized():
        return max(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
