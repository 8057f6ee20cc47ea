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
