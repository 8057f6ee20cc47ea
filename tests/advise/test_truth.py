"""The plan is what real runs need: the state to the byte, and the peak on four CPU ranks.

torch's profiler records the peak.
"""

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from case import Case, config_of
from omegaconf import DictConfig
from slow_rows import extra, slow_but
from torch.profiler import ProfilerActivity, profile
from worlds import once, run_world

from ddp_lab.advise.advisor import Advisor
from ddp_lab.advise.devices import find_devices
from ddp_lab.advise.plan import DeviceEstimate, plan_rank
from ddp_lab.launchers.command_line import compose_config
from ddp_lab.run.build import build
from ddp_lab.strategies.dtensor import local
from ddp_lab.training.optimizer import StepObserver
from ddp_lab.world.planned import PlannedRuntime
from ddp_lab.world.runtime import Runtime

VIT = "vit batch_size=192 samples=384"  # activations that the sums of the loss are small beside
# Convolutions of the CPU and DDP's reducer allocate memory of their own, which counts in models as
# small as these.
ON_FOUR = (f"fsdp {VIT} adamw ema=0.8",)  # shards of unequal size
SECOND = (  # which are slow tests
    "scratch ema=0.8",
    f"pipeline {VIT}",
    f"mesh pp=2 tp=2 short {VIT} ema=0.8",
    f"mesh shard=2 short {VIT} adamw",
)
THIRD = (  # which are extra tests: each combines what others have
    f"ddp {VIT}",
    "scratch algorithm=bucketed",
    f"fsdp checkpoint_activations=block {VIT}",
    "tp tp=2 ema=0.8",
    f"ddp_pipeline schedule=gpipe {VIT} clipped",
    f"scratch checkpoint_activations=block {VIT}",
    f"fsdp reshard_after_forward=false {VIT}",
    f"mesh tp=4 sequence_parallel=true short {VIT}",
)
ALONE = ["single", f"single {VIT} adamw ema=0.8", f"single checkpoint_activations=block {VIT}"]


class Real(NamedTuple):
    """What a rank held when the optimizer's step began, by kind, and the step's most bytes."""

    state_bytes: dict[str, int]
    peak: int


def nbytes(tensors: Any) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


def receive_buffers() -> dict[int, int]:
    """Return the bytes of what the stages of torch's pipelines receive into, by storage."""
    buffers = [each.buffer for each in gc.get_objects() if type(each).__name__ == "_RecvInfo"]
    return {
        buffer.untyped_storage()._cdata: buffer.nbytes
        for buffer in buffers
        if isinstance(buffer, torch.Tensor)
    }


def measure(runtime: Runtime, case: str) -> Real:
    with Case.of(case).default_dtype():
        gc.collect()
        others = receive_buffers()
        job = build(config_of(case), runtime)
        trainer = job.trainer()
        job.loaders["train"].set_epoch(1)
        batch = next(iter(job.loaders["train"]))
        module = job.strategy.module
        gradients = list[int]()
        parameters = list(module.parameters())
        job.strategy.train()
        noting = trainer.optimizer.register_step_pre_hook(
            StepObserver(
                lambda: gradients.append(
                    nbytes(each.grad for each in parameters if each.grad is not None)
                )
            )
        )
        trainer.eager_step(batch)
        noting.remove()
        # The least of several steps, because gloo's threads free at different times.
        peak = min(growth(lambda: trainer.eager_step(batch)) for _ in range(3))
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        state_bytes = {
            "parameters": nbytes(parameters),
            "gradients": gradients[0],
            "optimizer": nbytes(value for value in states if isinstance(value, torch.Tensor)),
            "averages": nbytes(trainer.ema.averages.values()) if trainer.ema else 0,
            "buffers": nbytes(module.buffers()),
        }
    # What lives between steps: the state without gradients, the batch, the running sums of the
    # loss, and buffers.
    buckets = state_bytes["gradients"] if "ddp" in job.strategy.name else 0
    buckets += sum(size for key, size in receive_buffers().items() if key not in others)
    between = (
        sum(state_bytes.values())
        - state_bytes["gradients"]
        + nbytes([*batch[:2], *trainer.eager_step.running_sums.state])
        + buckets
    )
    return Real(state_bytes, between + peak)


def growth(step: Callable[[], object]) -> int:
    """Return by how much the memory grows during a step, from the profiler's records."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    records = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    return max(
        accumulate(event.nbytes() for event in sorted(records, key=lambda event: event.start_ns()))
    )


def measure_all(cases: tuple[str, ...]) -> dict[str, Real]:
    with Runtime("cpu", timeout=60) as runtime:
        return {case: measure(runtime, case) for case in cases}


@once
def world(cases: tuple[str, ...]) -> list[dict[str, Real]]:
    return run_world(4, measure_all, cases)


def plan(case: str, ranks: int, rank: int) -> list[DeviceEstimate]:
    with Case.of(case).default_dtype():
        runtime = PlannedRuntime(ranks, ranks, "float32", kind="cpu")
        cfg = config_of(case)
        job = build(cfg, runtime.of_rank(rank))
        return plan_rank(cfg, job.dataset, job.model, runtime.of_rank(rank))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *ON_FOUR,
        *SECOND,
        *extra(THIRD),
    ],
)
def test_plan_is_what_the_first_and_the_last_rank_of_four_hold_and_need(case):
    (together,) = (cases for cases in (ON_FOUR, SECOND, THIRD) if case in cases)
    for rank in (0, 3):
        (planned,) = plan(case, 4, rank)
        real = world(together)[rank][case]
        assert planned.state_bytes == real.state_bytes, f"rank {rank}"
        assert planned.allocated == pytest.approx(real.peak, rel=0.05), f"rank {rank}"


@pytest.mark.parametrize("case", slow_but([ALONE[0], ALONE[2]], ALONE))
def test_plan_is_what_one_process_holds_and_needs(case):
    (planned,) = plan(case, 1, 0)
    real = measure(Runtime("cpu"), case)
    assert planned.state_bytes == real.state_bytes
    assert planned.allocated == pytest.approx(real.peak, rel=0.05)


def test_split_holds_a_stage_on_each_device():
    case = "split devices=[cpu,cpu,cpu]"
    trainer = build(config_of(case), Runtime("cpu")).trainer()
    state_bytes = [nbytes(stage.parameters()) for stage in trainer.strategy.stages]
    assert [planned.state_bytes["parameters"] for planned in plan(case, 1, 0)] == state_bytes


IMAGES = (
    "data=synthetic data.dataset.image_size=224 data.dataset.num_classes=1000 batch_size=64 "
    "precision=bf16 speed=off"
)
# torchvision's models that differ most in what they keep, and two Vision Transformers.
ON_GPU = {
    name: f"model=torchvision model.name={name} optimizer=sgd"
    for name in (
        "resnet18",
        "resnet50",
        "vgg16",
        "densenet121",
        "mobilenet_v3_large",
        "efficientnet_b0",
        "convnext_tiny",
        "swin_t",
        "regnet_y_400mf",
        "vit_b_16",
    )
} | {"ViT-S/16": "model=vit_s16 optimizer=adamw", "ViT-L/16": "model=vit_l16 optimizer=adamw"}


@pytest.mark.gpu(1)
def test_plan_is_what_a_gpu_allocates(capsys):
    errors = {}
    lines = ["model                planned MiB  allocated MiB  error"]
    for model, options in ON_GPU.items():
        sizes = "data.dataset.train_size=64 data.dataset.test_size=64"
        cfg = compose_config([*options.split(), *IMAGES.split(), *sizes.split()], None)
        measured = allocated(cfg)
        advisor = Advisor.of(
            [*options.split(), *IMAGES.split(), *sizes.split()], None, find_devices("1xH100")
        )
        planned = advisor.plan(["strategy=single"]).fullest.allocated
        errors[model] = planned / measured - 1
        lines.append(
            f"{model:20} {planned / 2**20:11,.0f} {measured / 2**20:14,.0f} {errors[model]:+6.1%}"
        )
    worst = sorted(errors, key=lambda name: -abs(errors[name]))[:2]
    lines.append("worst: " + ", ".join(f"{name} {errors[name]:+.1%}" for name in worst))
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert abs(errors[worst[0]]) < 0.1, lines[-1]


def allocated(cfg: DictConfig) -> int:
    """Return the most bytes that torch allocates on the GPU in the third step of a run."""
    gc.collect()
    torch.cuda.empty_cache()
    with Runtime("cuda", cfg.precision) as runtime:
        job = build(cfg, runtime)
        with job.options.backend_flags(runtime):
            trainer = job.trainer()
            job.loaders["train"].set_epoch(1)
            job.strategy.train()
            batch = next(iter(job.loaders["train"]))
            for _ in range(3):
                torch.cuda.reset_peak_memory_stats()
                trainer.eager_step(batch)
            return torch.cuda.max_memory_allocated()
