"""The peak of a process's memory, against the count of the kernel."""

from pathlib import Path

import pytest
import torch
from worlds import run_world

from ddp_lab.world.device import peak_memory_bytes

LARGE = 2**28  # bytes


def peaks() -> tuple[int, int, int]:
    """Return the peak before and after a tensor that is freed again, and that of the kernel."""
    before = peak_memory_bytes()
    for _ in range(2):
        torch.ones(LARGE, dtype=torch.uint8)
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return before, peak_memory_bytes(), peak


def test_peak_memory_is_that_of_the_kernel_and_includes_what_is_freed():
    ((before, after, peak),) = run_world(1, peaks)
    assert after == pytest.approx(peak, rel=0.01)
    assert LARGE * 0.9 < after - before < LARGE * 1.2
