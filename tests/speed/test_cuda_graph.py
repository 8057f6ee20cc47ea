"""A captured step takes the steps of an eager one.

Here a graph is a function that is called again; on GPUs: test_gpu.py.
"""

import warnings
from contextlib import nullcontext

import pytest
import torch
from stand_in_events import Event, replace_events
from stand_in_graphs import replace_graphs
from training import make_step

from ddp_lab.speed.cuda_graph import GraphStep
from ddp_lab.strategies.work_time import EventTimer
from ddp_lab.training.step import Step


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """Let GraphStep work without a GPU, and return what it does."""
    seen: list[str] = []
    replace_graphs(monkeypatch.setattr, seen)
    return seen


def train(step: Step | GraphStep, eager: Step, loader) -> list[float]:
    """Train for two epochs and return the learning rates."""
    rates = []
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        for batch in step.batches(loader):
            step(batch)
            rates.append(eager.lr)
    return rates


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["ema=0.9", "accumulate=2", "max_grad_norm=0.5"],
        ['optimizer.groups=[{"match":"*.bias","lr_scale":5},{"match":"fc*","lr_scale":0.1}]'],
    ],
    ids=["plain", "more", "groups"],
)
def test_captured_step_trains_like_an_eager_one(options, events):
    eager, loader = make_step(*options)
    step, loader_of_graph = make_step(*options)
    graph = GraphStep(step, loader_of_graph)
    with warnings.catch_warnings(action="error"):
        graph.capture(nullcontext())
    assert events == ["warn", "default", "capture", "capture"], (
        "a step that waits for the GPU must not reach the capture"
    )
    assert sorted(graph.graphs) == [12, 24]
    eager.running_sums.begin(0)
    step.running_sums.begin(0)
    if options:
        del graph.graphs[12]  # as after a resume from a checkpoint with another batch size
    assert train(graph, step, loader_of_graph) == train(eager, eager, loader)
    for mine, other in zip(
        step.strategy.module.parameters(), eager.strategy.module.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        step.running_sums.totals, eager.running_sums.totals, rtol=1e-6, atol=0
    )
    if step.ema:
        torch.testing.assert_close(step.ema.averages, eager.ema.averages, rtol=0, atol=1e-6)


def test_work_is_timed_in_a_graph_of_its_own(events, monkeypatch):
    """The steps between two exchanges replay graphs without events, which would cost time."""
    replace_events(monkeypatch)
    step, loader = make_step()
    timer = EventTimer()
    step.strategy.timer = timer
    compute = step.compute

    def timed(batch) -> None:  # as ddp and scratch do
        timer.begin()
        compute(batch)
        timer.end()

    monkeypatch.setattr(step, "compute", timed)
    graph = GraphStep(step, loader)
    graph.capture(nullcontext())
    assert events[-3:] == ["capture"] * 3, "of two batch sizes, and the larger one again"
    replays: list[str] = []
    for name, graphs in {"plain": graph.graphs, "timed": graph.timed}.items():
        for captured in graphs.values():
            monkeypatch.setattr(captured, "replay", lambda name=name: replays.append(name))
    timer.take(4)  # 4 steps lie between two exchanges
    for _ in range(4):
        graph.compute(24)
    assert replays == ["plain", "plain", "timed", "plain"]
    monkeypatch.setattr(timer.started, "at", 1.0, raising=False)
    monkeypatch.setattr(timer.ended, "at", 3.0, raising=False)
    assert timer.take(4) == 4 * 2.0
    assert Event.recorded == 2, "only where the events were created"
