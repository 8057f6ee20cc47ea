"""What a rank of a pipeline holds besides activations: predicted, and held by torch's stages in a step of two ranks."""

import math

import pytest
from cases import LENET, VIT, ddp_pipeline, mesh, name, pipeline
from training import Case, config_of
from worlds import once, run_world

from ddp_lab.estimate.blocks import Tracer
from ddp_lab.estimate.buckets import micro_batches_kept
from ddp_lab.estimate.planned import PlannedRuntime
from ddp_lab.estimate.stage_buffers import cast_images, stage_buffers
from ddp_lab.run.job import Job, prepare
from ddp_lab.run.materialize import materialize
from ddp_lab.run.places import place_along_pp
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.pipeline import Pipeline
from ddp_lab.strategies.share import Share
from ddp_lab.world.runtime import Runtime

CASES = [
    pipeline("1f1b"),
    pipeline("gpipe", cut=("fc1",), **LENET),
    pipeline("interleaved1f1b", **VIT),
    ddp_pipeline(2, "1f1b", **VIT),
    mesh(pp=2, **VIT),
]


def predicted(job: Job, rank: int) -> float:
    """Return the bytes that are predicted for a rank with the outputs of no micro-batch, which only exist during a step."""
    tracer = Tracer(job.model, job.loss, job.dataset.train.shape, "float32")
    samples = job.plan.samples_at_once
    blocks = tracer.blocks(job.strategy, job.strategy.share(job.model, rank), math.ceil(samples / 4))
    return stage_buffers(job.strategy, place_along_pp(job.strategy, rank), samples, blocks, 0, bf16=False)


def compare(runtime: Runtime, case: Case) -> tuple[float, float]:
    job = prepare(config_of(case), runtime)
    expected = predicted(job, runtime.rank)
    _ = materialize(job)
    strategy = job.strategy
    assert isinstance(strategy, Pipeline)
    job.loaders["train"].set_epoch(1)
    inputs, targets, count = next(iter(job.loaders["train"]))
    strategy.forward_backward(inputs, targets, count)
    (schedule,) = strategy.schedules.made.values()
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    received = [
        info.buffer
        for stage in stages
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        for info in infos
        if getattr(info, "buffer", None) is not None
    ]
    copied = strategy._prepare(inputs, training=True)[2]
    return expected, sum(tensor.nbytes for tensor in (*received, *copied))


def compare_all(cases: list[Case]) -> list[tuple[float, float]]:
    with Runtime("cpu", timeout=30) as runtime:
        runtime.open_group()
        return [compare(runtime, case) for case in cases]


@once
def world() -> list[list[tuple[float, float]]]:
    return run_world(2, compare_all, CASES)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_buffers_are_those_of_torchs_stages(case):
    for rank in world():
        expected, held = rank[CASES.index(case)]
        assert expected == held > 0


def test_outputs_are_kept_for_as_many_micro_batches_as_the_schedule_keeps():
    job = Job(config_of(pipeline("1f1b", cut=("fc1",), **LENET)), PlannedRuntime(2, 2, "float32"))
    job.partition()
    tracer = Tracer(job.model, job.loss, job.dataset.train.shape, "float32")
    blocks = tracer.blocks(job.strategy, job.strategy.share(job.model, 0), 6)
    kept = micro_batches_kept(job.strategy, 0)
    few, many = (stage_buffers(job.strategy, 0, 24, blocks, number, bf16=True) for number in (0, kept))
    assert kept == 2
    assert many - few == 2 * 6 * math.prod(job.strategy.shapes[2]) * 2  # bf16, which no block has made


def test_only_fully_shard_keeps_images_in_bf16():
    job = Job(
        config_of(Case(FSDP, (("reshard_after_forward", True), ("batch_norm", "local"), ("wrap", None)))),
        PlannedRuntime(1, 1, "bf16"),
    )
    job.partition()
    tracer = Tracer(job.model, job.loss, job.dataset.train.shape, "bf16")
    first = next(iter(tracer.blocks(job.strategy, Share(), 6).values()))
    assert cast_images(job.strategy, first, 1, bf16=True) == 6 * math.prod(job.dataset.train.shape) * 2
    assert cast_images(job.strategy, first, 1, bf16=False) == 0
    assert cast_images(job.strategy, None, 1, bf16=True) == 0
