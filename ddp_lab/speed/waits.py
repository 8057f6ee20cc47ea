"""Find the operations for which the host waits for the GPU, which a CUDA graph cannot capture."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager

import torch

WAITS = "called a synchronizing CUDA operation"  # torch's warning


@contextmanager
def waits_for_gpu() -> Generator[list[str]]:
    """Return a list that has, after the body, the place of each operation that waited for the GPU.

    torch warns of them. As errors they would end the body in the middle: where only one stage of a
    pipeline waits, the GPUs of the other ranks would then expect its messages forever.
    """
    places: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for warning in caught:
        text = str(warning.message)
        if text.startswith(WAITS):
            places.append(f"{warning.filename}:{warning.lineno}")
        elif not text.startswith("Synchronization debug mode is a prototype"):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
