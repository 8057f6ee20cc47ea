"""CUDA graphs without a GPU: a graph is a function that is called again."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ddp_lab.speed import cuda_graph
from ddp_lab.speed.cuda_graph import GraphStep


def replace_graphs(replace: Callable[[Any, str, Any], Any], events: list[str]) -> None:
    """Let GraphStep work without a GPU. A replay reads the learning rate where the capture does.

    Args:
        replace: `setattr`, or that of a monkeypatch.
        events: gets the modes in which torch reports waits for the GPU, and "capture" for each one.
    """

    def set_mode(mode: str) -> None:
        events.append(mode)
        # as torch does, on every rank
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    def captured(work: Callable[[], None], pool: object) -> SimpleNamespace:
        events.append("capture")
        return SimpleNamespace(replay=work)

    compute = GraphStep.compute

    def replay(step: GraphStep, global_size: int) -> None:
        with step._rate_on_device():
            compute(step, global_size)

    replace(torch.cuda, "graph_pool_handle", lambda: None)
    replace(torch.cuda, "set_sync_debug_mode", set_mode)
    replace(cuda_graph, "captured", captured)
    replace(GraphStep, "compute", replay)
