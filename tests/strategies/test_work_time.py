"""The time of a rank's work: each step by the clock, one of many by CUDA events.

Here events are numbers of the test; on GPUs: test_gpu.py.
"""

import time

import pytest
import torch
from stand_in_events import Event, OldEvent, replace_events
from torch import nn
from worlds import run_world

from ddp_lab.strategies.ddp import DDP
from ddp_lab.strategies.scratch import Scratch
from ddp_lab.strategies.work_time import EventTimer, HostTimer, make_timer
from ddp_lab.tasks.base import Task
from ddp_lab.world.runtime import Runtime


def test_host_timer_adds_the_steps_since_it_was_read(monkeypatch):
    now = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    timer = make_timer(torch.device("cpu"))
    assert isinstance(timer, HostTimer)
    for seconds in (1.0, 2.0):
        timer.begin()
        now[0] += seconds
        timer.end()
        now[0] += 100.0  # the wait for the others
    assert [timer.take(2), timer.take(0)] == [3.0, 0.0]


def take_steps(timer: EventTimer, number: int, seconds: float = 1.0) -> list[int]:
    """Take steps, each longer than the one before; return the numbers of those that are timed."""
    timed = []
    for step in range(number):
        before = Event.recorded
        timer.begin()
        Event.now += seconds + step
        timer.end()
        if Event.recorded > before:
            timed.append(step)
    return timed


def test_event_timer_times_the_step_in_the_middle_of_two_exchanges(monkeypatch):
    replace_events(monkeypatch)
    timer = make_timer(torch.device("cuda"))
    assert isinstance(timer, EventTimer)
    assert take_steps(timer, 3) == [], "those before the first exchange are a warm-up"
    assert timer.take(3) == 0.0
    assert take_steps(timer, 4) == [1]  # 3 // 2
    assert timer.take(4) == 4 * 2.0, "step 1 took 2 s, and stands for all"
    assert take_steps(timer, 1) == []
    assert timer.take(1) == 2.0, "the exchange came early: the last known one"
    assert take_steps(timer, 3, 7.0) == [0]  # 1 // 2
    assert timer.take(3) == 3 * 7.0


def test_event_timer_does_not_wait_for_the_device(monkeypatch):
    replace_events(monkeypatch)
    timer = EventTimer()
    timer.take(0)
    take_steps(timer, 2)
    Event.is_late = True
    assert timer.take(2) == 0.0
    assert take_steps(timer, 4) == [], "its events are still in the queue"
    Event.is_late = False
    assert timer.take(4) == 4.0


@pytest.mark.parametrize(("kind", "works"), [(Event, True), (OldEvent, False)])
def test_events_are_external_where_torch_has_them(kind, works, monkeypatch):
    replace_events(monkeypatch, kind)
    timer = EventTimer()
    assert timer.works_in_graphs is works
    assert [timer.started.external, timer.ended.external] == [works, works]


class Calls(HostTimer):
    def __init__(self):
        super().__init__()
        self.calls = []

    def begin(self):
        self.calls.append("begin")

    def end(self):
        self.calls.append("end")


class Noted(nn.Linear):
    """A layer that notes when its backward pass begins, in the calls of the timer."""

    def forward(self, inputs):
        outputs = super().forward(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda _: self.calls.append("backward"))
        return outputs


def calls_of_steps() -> dict[str, list[str]]:
    """Take two steps of two gradient-accumulation steps each under the strategies that time."""
    seen = {}
    for name, make in {
        "ddp": lambda runtime: DDP(runtime, "local", 25.0),
        "scratch": lambda runtime: Scratch(runtime, "flat", 25.0, "local"),
        "bucketed": lambda runtime: Scratch(runtime, "bucketed", 25.0, "local"),
        "sync": lambda runtime: DDP(runtime, "sync", 25.0),
    }.items():
        with Runtime("cpu") as runtime:
            strategy = make(runtime)
            strategy.time_work()
            if strategy.timer is None:
                seen[name] = None
                continue
            timer = Calls()
            strategy.timer = timer
            layer = Noted(2, 1)
            layer.calls = timer.calls
            strategy.place(layer, Task(lambda outputs, targets: outputs[:, 0]))
            strategy.train()
            timer.calls.clear()
            for _ in range(2):
                strategy.forward_backward(torch.ones(2, 2), torch.zeros(2), 4, accumulate=2)
                layer.zero_grad()
            seen[name] = [*timer.calls]
            del strategy
    return seen


def test_work_ends_with_the_last_gradient_of_the_last_accumulation_step():
    step = ["begin", "backward", "backward", "end"]
    for calls in run_world(2, calls_of_steps):
        assert calls == {"ddp": 2 * step, "scratch": 2 * step, "bucketed": 2 * step, "sync": None}


def test_step_that_a_graph_captures_records_the_events(monkeypatch):
    replace_events(monkeypatch)
    timer = EventTimer()
    with timer.in_graph():
        Event.recorded = 0
        assert take_steps(timer, 1) == [0]
        assert Event.recorded == 2
    assert take_steps(timer, 3) == []
    assert timer.take(3) == 0.0, "a capture computes nothing"


def gradients(is_timed: bool) -> list[torch.Tensor]:
    with Runtime("cpu") as runtime:
        strategy = DDP(runtime, "local", 25.0)
        if is_timed:
            strategy.time_work()
        torch.manual_seed(0)
        strategy.place(nn.Linear(2, 1), Task(lambda outputs, targets: outputs[:, 0]))
        strategy.train()
        inputs = torch.full((2, 2), 1.0 + runtime.rank)
        strategy.forward_backward(inputs, torch.zeros(2), 4)
        summed = [parameter.grad.clone() for parameter in strategy.module.parameters()]
        del strategy
    return summed


def both_gradients() -> list[list[torch.Tensor]]:
    return [gradients(is_timed=False), gradients(is_timed=True)]


def test_timed_ddp_sums_gradients_as_before():
    for untimed, timed in run_world(2, both_gradients):
        # samples of 1 on rank 0 and of 2 on rank 1: 2 * (1 + 2) / 4
        assert untimed[0].tolist() == [[1.5, 1.5]]
        assert [each.tolist() for each in timed] == [each.tolist() for each in untimed]
