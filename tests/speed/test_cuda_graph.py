"""A captured step takes the steps of an eager one. Here a graph is a function that is called again; on GPUs: test_gpu.py."""

import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from training import make_step

from ddp_lab.data.batch import BatchSize
from ddp_lab.speed import cuda_graph
from ddp_lab.speed.cuda_graph import GraphStep
from ddp_lab.training.step import Step


@pytest.fixture
def modes(monkeypatch) -> list[str]:
    """Let GraphStep work without a GPU, and return the modes in which waiting for it was an error, or not.

    A replay reads the learning rate where the capture has read it.
    """
    set_to: list[str] = []

    def set_mode(mode: str) -> None:
        set_to.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)  # as torch does, on every rank

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(cuda_graph, "captured", lambda work, pool: SimpleNamespace(replay=work))
    compute = GraphStep.compute

    def replay(step: GraphStep, size: BatchSize) -> None:
        with step._rate_on_device():
            compute(step, size)

    monkeypatch.setattr(GraphStep, "compute", replay)
    return set_to


def train(step: Step | GraphStep, eager: Step, loader) -> list[float]:
    """Train for two epochs and return the learning rates."""
    rates = []
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        for batch in step.batches(loader):
            step(batch)
            rates.append(eager.lr)
    return rates


@pytest.mark.parametrize("options", [[], ["ema=0.9", "accumulate=2", "max_grad_norm=0.5"]], ids=["plain", "more"])
def test_captured_step_trains_like_an_eager_one(options, modes):
    eager, loader = make_step(*options)
    step, own = make_step(*options)
    graph = GraphStep(step, own)
    with warnings.catch_warnings(action="error"):
        graph.capture(nullcontext())
    assert modes == ["warn", "default"], "a step that waits for the GPU must not reach the capture"
    assert sorted(graph.graphs) == [BatchSize(12, 12), BatchSize(24, 24)]
    eager.running_sums.begin(0)
    step.running_sums.begin(0)
    if options:
        del graph.graphs[BatchSize(12, 12)]  # as after a resume from a checkpoint with another batch size
    assert train(graph, step, own) == train(eager, eager, loader)
    for mine, other in zip(step.strategy.module.parameters(), eager.strategy.module.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    torch.testing.assert_close(step.running_sums.totals, eager.running_sums.totals, rtol=1e-6, atol=0)
    if step.ema:
        torch.testing.assert_close(step.ema.averages, eager.ema.averages, rtol=0, atol=1e-6)
