"""A captured step takes the steps of an eager one.

Here a graph is a function that is called again; on GPUs: test_gpu.py.
"""

import random
import re
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from case import config_of
from stand_in_events import Event, replace_events
from stand_in_graphs import replace_graphs
from training import make_step
from worlds import run_world

from ddp_lab.run.build import build
from ddp_lab.speed.cuda_graph import GraphStep
from ddp_lab.speed.host_state import HostState
from ddp_lab.strategies.work_time import EventTimer
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime


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


class Counting(torch.nn.Module):
    """Keeps something on the host, in a way that its name says."""

    def __init__(self, model: torch.nn.Module, how: str):
        super().__init__()
        self.model = model
        self.how = how
        self.steps = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        if self.how == "attribute":
            self.steps += 1
        elif self.how == "buffer":
            self.seen = self.seen + 1
        elif self.how == "in place":
            self.seen += 1
        elif self.how == "random":
            random.random()
        elif self.how == "numpy":
            np.random.rand()
        return self.model(inputs)


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("attribute", "the step changes steps of the model, which a CUDA graph would not repeat"),
        ("buffer", "the step replaces the buffer model.seen by another tensor, which a CUDA"),
        ("random", "the step draws random numbers from Python's generator of the host, which a"),
        ("numpy", "the step draws random numbers from NumPy's generator of the host, which a"),
        ("in place", None),
    ],
)
def test_step_that_changes_something_on_the_host_is_not_captured(how, problem, events):
    step, loader = make_step()
    model = Counting(step.strategy.module, how)
    step.strategy.module = model
    step.strategy.forward = model
    graph = GraphStep(step, loader)
    if problem is None:
        graph.capture(nullcontext())
        assert graph.graphs
        return
    with pytest.raises(RuntimeError, match=re.escape(problem)):
        graph.capture(nullcontext())
    assert "capture" not in events
    assert (model.steps, float(model.seen)) == (0, 0.0), "the trial must be undone"


def test_loss_that_changes_something_on_the_host_is_not_captured(events):
    step, loader = make_step("loss=own", "loss._target_=own_losses.Replacing")
    problem = "changes the attribute calls of the module loss of the loss, which a CUDA graph"
    with pytest.raises(RuntimeError, match=problem):
        GraphStep(step, loader).capture(nullcontext())
    assert "capture" not in events


def test_steps_run_in_eager_mode_after_an_attribute_has_changed(events, caplog):
    """As a callback may do between epochs: the graph would go on with the number of the capture."""
    step, loader = make_step()
    model = Counting(step.strategy.module, "")
    step.strategy.module = model
    step.strategy.forward = model
    graph = GraphStep(step, loader)
    graph.capture(nullcontext())
    step.running_sums.begin(0)
    loader.set_epoch(1)
    assert [*graph.batches(loader)]
    assert graph.graphs, "nothing has changed"
    model.steps = 3
    loader.set_epoch(2)
    for batch in graph.batches(loader):
        graph(batch)
    assert not graph.graphs
    assert "steps of the model has changed since the step was captured" in caplog.text


@pytest.mark.parametrize(
    "model",
    [
        "model=resnet18",
        "model=book_resnet18",
        "model=vit model.drop_path=0.5",
        "model=vit checkpoint_activations=block",
        "model=lenet mixup=0.5 max_grad_norm=0.1 ema=0.9",
    ],
)
def test_models_of_ddp_lab_keep_nothing_on_the_host(model):
    step, loader = make_step(*model.split())
    loader.set_epoch(1)
    batch, *_ = loader
    step.compute(batch)
    before = HostState.of(step.strategy)
    step.compute(batch)
    assert before.difference(HostState.of(step.strategy)) == ""


def difference_on_host(line: str) -> str:
    """Return what a step of a strategy changes on the host of this rank."""
    with Runtime("cpu", timeout=30) as runtime:
        runtime.open_group()
        job = build(config_of(f"{line} samples=48 epochs=1"), runtime)
        step = job.trainer().eager_step
        loader = job.loaders["train"]
        loader.set_epoch(1)
        batch, *_ = loader
        step.compute(batch)
        before = HostState.of(step.strategy)
        step.compute(batch)
        return before.difference(HostState.of(step.strategy))


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "ddp",
        "scratch algorithm=bucketed",
        "fsdp vit",
        "tp vit",
        "pipeline",
        "mesh tp=2 vit",
        "mesh shard=2 vit",
        "mesh pp=2 vit",
    ],
)
def test_strategies_keep_nothing_on_the_host(line):
    assert run_world(2, difference_on_host, line, timeout=60) == ["", ""]


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
