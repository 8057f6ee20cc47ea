"""The step of a pipeline as a CUDA graph, which is a stand-in here; on GPUs: test_gpu.py."""

import warnings
from contextlib import nullcontext
from functools import wraps
from typing import Any

import pytest
import torch
import training
from case import config_of, reference_of
from cases import assert_equal, tolerance_of
from slow_rows import slow
from small_networks import make_model
from stand_in_graphs import replace_graphs
from training import Outcome, run_cases
from worlds import once, run_world

from ddp_lab.config.build import call_target
from ddp_lab.run.build import build
from ddp_lab.speed.cuda_graph import WARM_UP, GraphStep
from ddp_lab.speed.waits import WAITS
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime

# A schedule's micro-batches, before and in the steps of a batch size.
WARMED_UP = ["micro-batches", *["step", "micro-batches"] * WARM_UP]
ORDER = [*WARMED_UP, *WARMED_UP, "warn", "step", "micro-batches", "default", "capture", "capture"]


def run_captured(case: str) -> tuple[Outcome, list[str]]:
    """Return the outcome of a case whose step is captured, and what was done before it trains."""
    events: list[str] = []
    replace_graphs(setattr, events)

    def noting(event: str, function: Any) -> Any:
        @wraps(function)
        def noted(*arguments: Any) -> Any:
            events.append(event)
            return function(*arguments)

        return noted

    def capture(options: object, step: Step, loader: Any, steps_left: int) -> GraphStep:
        step.compute = noting("step", step.compute)
        step.strategy.add_gradient = noting("micro-batches", step.strategy.add_gradient)
        graph = GraphStep(step, loader)
        graph.capture(nullcontext())
        before.extend(events)
        return graph

    before: list[str] = []
    training.build_step = capture
    return run_cases([case])[case], before


CASES = ["pipeline clipped"]
FURTHER = [  # slow
    "pipeline schedule=interleaved1f1b recipe",
    "mesh pp=2 vit",
    "pipeline tokens",
    "ddp_pipeline pp=1 schedule=gpipe clipped",
]


def run_all_captured(cases: list[str]) -> dict[str, Any]:
    return {case: run_captured(case) for case in cases}


@once
def captured_world(is_slow: bool) -> list[dict[str, Any]]:
    return run_world(2, run_all_captured, FURTHER if is_slow else CASES, timeout=200)


@once
def references(is_slow: bool) -> dict[str, Any]:
    lines = dict.fromkeys(map(reference_of, FURTHER if is_slow else CASES))
    return run_world(1, run_cases, list(lines))[0]


@pytest.mark.parametrize("case", [*CASES, *slow(FURTHER)])
def test_captured_pipeline_trains_as_one_device(case):
    """The steps of the warm-up are undone, and all ranks warm up and capture in the same order."""
    (outcome, before), (_, other) = (outcomes[case] for outcomes in captured_world(case in FURTHER))
    assert before == other == ORDER
    expected = references(case in FURTHER)[reference_of(case)]
    assert_equal(outcome, expected, tolerance_of(case))


def capture_with_a_waiting_stage(waiting: int) -> tuple[str, list[str], float]:
    """Return the error of a capture where one rank waits, the events, and a later loss sum."""
    events: list[str] = []
    replace_graphs(setattr, events)
    with Runtime("cpu", timeout=30) as runtime:
        runtime.open_group()
        return error_of_capture(runtime, waiting, events)


def error_of_capture(
    runtime: Runtime,
    waiting: int,
    events: list[str],
) -> tuple[str, list[str], float]:
    def wait(module: torch.nn.Module, inputs: object) -> None:
        if events[-1:] == ["warn"]:
            warnings.warn(f"{WAITS} (Triggered internally at ...)", stacklevel=1)

    job = build(config_of("pipeline"), runtime)
    step = job.trainer().eager_step
    loader = job.loaders["train"]
    if runtime.rank == waiting:
        next(job.strategy.module.children()).register_forward_pre_hook(wait)
    with pytest.raises(RuntimeError) as caught:
        GraphStep(step, loader).capture(nullcontext())
    step.running_sums.begin(0)
    loader.set_epoch(1)
    for batch in loader:
        step(batch)
    return str(caught.value), events, step.running_sums.totals[0].item()


@pytest.mark.parametrize("waiting", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_stage_that_waits_for_its_gpu_refuses_the_capture_on_all_ranks(waiting):
    """A rank that left the step would leave the other one with messages that never come."""
    ranks = run_world(2, capture_with_a_waiting_stage, waiting, timeout=60)
    errors, events, losses = zip(*ranks, strict=True)
    assert errors[0] == errors[1]
    assert errors[0].startswith("the step waits for the GPU at ")
    assert f"{__file__}:" in errors[0]
    assert errors[0].endswith(f" on rank {waiting}")
    assert events[0] == events[1] == ["warn", "default"], "nothing may be captured"
    assert losses[1] > 0, "the step in eager mode must go on"


def test_norm_of_a_stage_without_gradients_is_computed_on_its_device(monkeypatch):
    """torch's norm of no gradients is on the host; a graph cannot capture its copy to the GPU."""
    strategy = call_target(config_of("single").strategy, Runtime("cpu"))
    strategy.module = make_model("lenet", seed=1)
    strategy.device = torch.device("meta")
    monkeypatch.setattr("ddp_lab.strategies.base.get_total_norm", None)
    norm = Strategy.gradient_norm(strategy)
    assert norm.device.type == "meta"
    assert norm.shape == ()
