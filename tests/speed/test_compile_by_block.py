"""torch.compile in strategies; by block, where equal blocks share one compilation. The results stay the same."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import training
from cases import assert_equal
from configs import config
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import Outcome, make_model, reference_of, run_cases
from worlds import once, run_world

from ddp_lab.config.build import build
from ddp_lab.run.speed import refusals_of
from ddp_lab.speed.compile import repeats
from ddp_lab.speed.convolution import pad_convolutions
from ddp_lab.world.runtime import Runtime


def test_sharded_convolutions_are_not_replaced():
    """fully_shard gathers the parameters into the module that it was applied to, so it must not be replaced."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = nn.Sequential(nn.Conv2d(1, 20, 3), nn.BatchNorm2d(20))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    pad_convolutions(model)
    dist.destroy_process_group()
    assert [type(layer) for layer in model] == [nn.Conv2d, nn.BatchNorm2d]


@pytest.mark.parametrize(
    ("options", "model", "reason"),
    [
        ("fsdp", None, "strategy=fsdp compiles a model in "),
        ("pipeline strategy.schedule=interleavedzerobubble", "vit", "cuts the "),
    ],
)
def test_compile_is_not_supported_with_a_reason(options, model, reason, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    made = build(config(*f"strategy={options}".split()).strategy, Runtime("cpu"))
    complete = make_model(model, 0) if model else nn.Linear(3, 3)
    made.partition(complete, 8)
    assert repeats(complete) == bool(model), "only a chain of equal blocks is compiled by block"
    assert reason in refusals_of(made, complete)["compile"]


# The number of graphs on rank 0: of the embedding, of both blocks, of the head and of the loss, as far as the rank has them. A
# pipeline's loss is not compiled. Collectives of tensor parallelism divide a graph; there are as many for four blocks.
FAST = {
    "fsdp checkpoint_activations=block short clipped": 4,
    "ddp channels_last=true recipe ema=0.8": 2,  # of the model and of the loss
}
SLOW = {
    "mesh tp=2 sequence_parallel=true short": 9,
    "scratch algorithm=bucketed accumulate=3 vit clipped": 4,
    "ddp_pipeline pp=1 vit": 3,
    "mesh pp=2 checkpoint_activations=block short": 2,
}


def run_compiled(cases: list[str]) -> dict[str, tuple[Outcome, int]]:
    """Return each case's outcome, and how many graphs were compiled. aot_eager compiles in a tenth of Inductor's time."""
    counter, graphs, run_case = CompileCounterWithBackend("aot_eager"), {}, training.run_case

    def counted(runtime: Runtime, case: str) -> Outcome:
        counter.clear()
        outcome = run_case(runtime, case)
        graphs[case] = counter.frame_count
        return outcome

    training.run_case = counted
    torch.compile = partial(count_graphs, torch.compile, counter)
    return {case: (outcome, graphs[case]) for case, outcome in run_cases(cases).items()}


def count_graphs(compile: Callable, counter: CompileCounterWithBackend, model: Callable, dynamic: bool, options: dict):
    return compile(model, dynamic=dynamic, backend=counter)


@once
def world(slow: bool) -> tuple[dict, dict]:
    """Return the outcomes and numbers of graphs on rank 0, and the outcomes of the references."""
    cases = [f"{case} compile=true" for case in (SLOW if slow else FAST)]
    references = list(dict.fromkeys(map(reference_of, cases)))
    return run_world(2, run_compiled, cases, timeout=500)[0], run_world(1, run_cases, references)[0]


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_compiled_strategies_equal_single(case):
    compiled, references = world(case in SLOW)
    outcome, graphs = compiled[f"{case} compile=true"]
    assert_equal(outcome, references[reference_of(case)])
    assert graphs == (FAST | SLOW)[case]
