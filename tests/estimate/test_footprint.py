"""The predicted bytes of parameters, gradients, optimizer state and averages are exactly those that ranks hold."""

import pytest
import torch
from cases import (
    ADAMW,
    CLIPPED,
    FROZEN,
    HALF,
    LENET,
    RECIPE,
    VIT,
    ddp,
    ddp_pipeline,
    fsdp,
    mesh,
    name,
    pipeline,
    scratch,
    split,
    tp,
)
from training import Case, config_of, default_dtype
from worlds import once, run_world

from ddp_lab.config.build import build
from ddp_lab.estimate.footprint import Footprint, footprint
from ddp_lab.estimate.optimizer_state import state_of
from ddp_lab.run.job import prepare
from ddp_lab.run.materialize import materialize
from ddp_lab.strategies.shards import local
from ddp_lab.strategies.single import Single
from ddp_lab.world.runtime import Runtime

EMA = {"ema": 0.8}
ON_FOUR = [
    scratch(**EMA),
    ddp(**FROZEN),
    ddp("sync", model="narrow", **EMA),
    fsdp(**EMA),  # 10 units over 4 ranks: shards of 3, 3, 3 and 1
    fsdp(**FROZEN),
    fsdp(**VIT | ADAMW | EMA),
    pipeline("1f1b"),
    pipeline("gpipe", cut=("conv2", "fc1", "fc2")),
    ddp_pipeline(2, "interleaved1f1b", **CLIPPED),
    ddp_pipeline(2, "gpipe", cut=("fc1",), **FROZEN),
    tp(2, **EMA),
    tp(4, HALF, optimizer="adamw"),
    mesh(),
    mesh(shard=None, **EMA),
    mesh(shard=2, **ADAMW),
    mesh(tp=4, sequence=True),
    mesh(shard=None, tp=2, **ADAMW | {"optimizer": "fused_adamw"}),
    mesh(pp=2, tp=2, **EMA),
    mesh(shard=None, pp=2, schedule="interleaved1f1b", **EMA),
    mesh(pp=2, shard=None, cut=("fc1",), **LENET),
]
SLOW = [1, 4, 5, 7, 9, 11, 12, 13, 15, 16, 18, 19]  # second examples, by their places in the list
ALONE = [Case(Single), Case(Single, **ADAMW, **EMA), Case(Single, **FROZEN), Case(Single, model="narrow", **RECIPE, **EMA)]


def compare(runtime: Runtime, case: Case) -> tuple[Footprint, Footprint]:
    """Return the prediction for this rank, and what it holds after a step; the gradients are those before they are zeroed."""
    with default_dtype(case.dtype):
        job = prepare(config_of(case), runtime)
        share = job.strategy.share(job.model, runtime.rank)
        predicted = footprint(share, job.model, build(job.cfg.optimizer), case.ema is not None)
        training = materialize(job)
        job.loaders["train"].set_epoch(1)
        job.strategy.forward_backward(*next(iter(job.loaders["train"])))
        parameters = list(job.strategy.module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        training.optimizer.step()
        states = [value for state in training.optimizer.state.values() for value in state.values()]
        tensors = [value for value in states if isinstance(value, torch.Tensor)]
        averages = list(training.ema.averages.values()) if training.ema else []
        held = [parameters, gradients, tensors, averages, list(job.strategy.module.buffers())]
    return predicted, Footprint(*(sum(local(tensor).nbytes for tensor in group) for group in held))


def compare_all(cases: list[Case]) -> dict[Case, tuple[Footprint, Footprint]]:
    with Runtime("cpu", timeout=30) as runtime:
        runtime.open_group()
        return {case: compare(runtime, case) for case in cases}


@once
def world(slow: bool) -> list[dict[Case, tuple[Footprint, Footprint]]]:
    return run_world(4, compare_all, [case for i, case in enumerate(ON_FOUR) if (i in SLOW) == slow])


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name(case), marks=[pytest.mark.slow] * (i in SLOW)) for i, case in enumerate(ON_FOUR)]
)
def test_footprint_is_what_each_rank_of_four_holds(case):
    pairs = [rank[case] for rank in world(ON_FOUR.index(case) in SLOW)]
    assert [predicted for predicted, _ in pairs] == [held for _, held in pairs]
    assert min(held.parameters for _, held in pairs) > 0


@pytest.mark.parametrize("case", ALONE, ids=name)
def test_footprint_is_what_one_process_holds(case):
    predicted, held = compare(Runtime("cpu"), case)
    assert predicted == held
    assert predicted.total == sum(vars(held).values())


def test_split_holds_a_stage_on_each_device():
    job = prepare(config_of(split(3, 4)), Runtime("cpu"))
    predicted = [
        footprint(job.strategy.share(job.model, device), job.model, build(job.cfg.optimizer), False).parameters
        for device in range(3)
    ]
    materialize(job)
    assert predicted == [sum(tensor.nbytes for tensor in stage.parameters()) for stage in job.strategy.stages]


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (torch.optim.AdamW, (2, 4)),
        (torch.optim.SGD, (0, 0)),
        (lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9), (1, 0)),
        (torch.optim.Adagrad, (1, 4)),
        (lambda parameters: torch.optim.Adam(parameters, capturable=True), (2, 4)),
    ],
)
def test_state_of_an_optimizer_is_found_by_a_step(optimizer, expected):
    assert state_of(optimizer) == expected
