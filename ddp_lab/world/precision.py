"""The precision of float32 matrix multiplications on GPUs that have TF32."""

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def float32_matmul(precision: str) -> Generator[None]:
    """Let float32 matrix multiplications use full precision ("highest"), or TF32 on GPUs that have it ("high")."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def describe_matmul(choice: str, precision: str, device: torch.device) -> str | None:
    """Return the log's line about float32 matrix multiplications; None where TF32 is never used.

    Args:
        choice, precision: the config keys `float32_matmul` and `precision`.
        device: of this rank. GPUs older than compute capability 8.0 (Ampere) do not have TF32.
    """
    if precision != "float32" or device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    other = {
        "highest": "float32 matrix multiplications use full precision; high uses TF32, which is faster and rounds to 3 digits",
        "high": "float32 matrix multiplications use TF32, which rounds to 3 digits; highest uses full precision",
    }
    return f"float32_matmul={choice}: {other[choice]}. cuDNN's convolutions use TF32 with both"
