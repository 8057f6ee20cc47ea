"""The equivalence matrix and the launch commands on GPUs, with NCCL. A test is skipped with fewer GPUs than it needs.

python -m pytest -m gpu
"""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import NamedTuple

import pytest
import torch
import training
from cases import (
    ADAMW,
    AUGMENTED,
    CLIPPED,
    FOCAL,
    HALF,
    ON_EIGHT,
    RECIPE,
    SHORT,
    VIT,
    assert_equal,
    ddp,
    ddp_pipeline,
    fsdp,
    mesh,
    name,
    pipeline,
    scratch,
    tp,
)
from launches import OWN, SMALL, launch, only_run, read_metrics
from run_checks import check_run
from training import Case, Performance, largest_difference, run_case, run_cases
from worlds import once, run_world

from ddp_lab.speed import fastest
from ddp_lab.speed.cuda_graph import GraphStep
from ddp_lab.strategies.ddp import DDP
from ddp_lab.strategies.dp import DP
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.scratch import Scratch
from ddp_lab.strategies.single import Single
from ddp_lab.strategies.split import Split
from ddp_lab.strategies.tp import TP
from ddp_lab.world.runtime import Runtime

WORLDS = [pytest.param(size, marks=pytest.mark.gpu(size)) for size in (2, 4)]
REPLICAS = [
    scratch("per_tensor", start=1),
    scratch("flat", start=1),
    scratch(samples=97, loader="workers"),
    scratch(accumulate=3, **CLIPPED),
    ddp(start=1),
    ddp(samples=97, loader="workers"),
    ddp(accumulate=3, **CLIPPED),
    fsdp(),
    fsdp(reshard=False, samples=97),
    fsdp(accumulate=2, **CLIPPED),
]
MODEL_PARALLEL = {
    2: [
        *(pipeline(schedule) for schedule in ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble")),
        pipeline("1f1b", m=5, samples=97, **CLIPPED),
        ddp_pipeline(2, "1f1b"),
        tp(2, samples=97),
        tp(2, accumulate=2, **CLIPPED),
        mesh(shard=None, checkpointing="block", accumulate=2, **CLIPPED),
        mesh(tp=2, sequence=True, **CLIPPED),
        mesh(pp=2, checkpointing="block", accumulate=2),
        mesh(tp=2, sequence=True, **ADAMW | {"optimizer": "fused_adamw"}),
    ],
    4: [
        pipeline("gpipe"),
        pipeline("1f1b", m=5, **CLIPPED),
        *(ddp_pipeline(2, schedule) for schedule in ("gpipe", "1f1b", "interleaved1f1b")),
        ddp_pipeline(2, "1f1b", m=5, samples=97, accumulate=2, **CLIPPED),
        tp(2, **CLIPPED),
        tp(4, HALF, samples=97),
        mesh(pp=2, tp=2, sequence=True, **CLIPPED),
        mesh(shard=None, tp=2, sequence=True, accumulate=2, **CLIPPED),
        mesh(shard=None, pp=2, **CLIPPED),
        mesh(shard=2, accumulate=2, **CLIPPED),
    ],
    8: ON_EIGHT,
}
# In float64, because in float32 a rounding error can change the sign of a ReLU's input:
# after one step the first layers' weights were 3e-5 apart in all strategies that sum over ranks, and 4e-16 in float64.
ONE_STEP = {"model": "resnet18", "samples": 24, "epochs": 1, "dtype": torch.float64}
SYNC = [scratch(batch_norm="sync", **ONE_STEP), ddp("sync", **ONE_STEP), fsdp(batch_norm="sync", **ONE_STEP)]
EMPTY = ONE_STEP | {"samples": 25}  # two steps; in the second only rank 0 has a sample
SYNC += [ddp("sync", **EMPTY), fsdp(batch_norm="sync", **EMPTY)]
SYNC += [tp(2, batch_norm="sync", **ONE_STEP, **CLIPPED)]


def devices(size: int) -> tuple[str, tuple[str, ...]]:
    return "devices", tuple(f"cuda:{i}" for i in range(size))


def one_process(size: int) -> list[Case]:
    return [
        Case(DP, (devices(size),)),
        Case(DP, (devices(size),), samples=97, loader="workers"),
        Case(Split, (devices(size), ("num_microbatches", 1))),
        Case(Split, (devices(size), ("num_microbatches", 4))),
        Case(Split, (devices(size), ("num_microbatches", 5)), samples=97, loader="workers", **FOCAL),
    ]


GRAPH, FUSED, BOTH = (
    Performance(cuda_graph=True),
    Performance(compile=True, channels_last=True),
    Performance(cuda_graph=True, compile=True, channels_last=True),
)


def with_options(performance: Performance, *cases: Case) -> list[Case]:
    return [replace(case, performance=performance) for case in cases]


ALGORITHMS = [scratch(algorithm) for algorithm in ("star", "per_tensor", "flat", "bucketed", "ring")]
# The fused optimizer of a graph requires float32. Compiled kernels round differently, which changes the sign of a ReLU's input:
# after 15 steps the weights differ by 4e-6 in float32, and by 3e-17 in float64 (an H200).
MOVED = AUGMENTED | {"crop_padding": 2, "dtype": torch.float32}
EXACT_VIT = VIT | {"dtype": torch.float64}
PLAIN = [Case(Single), Case(Single, **CLIPPED, accumulate=3)]
ALONE = [case for performance in (GRAPH, FUSED, BOTH) for case in with_options(performance, *PLAIN)]
ALONE += [
    *with_options(GRAPH, Case(Single, **MOVED), Case(Single, **RECIPE)),
    *with_options(BOTH, Case(Single, **AUGMENTED), Case(Single, accumulate=3, **RECIPE)),
    *with_options(BOTH, Case(Single, **EXACT_VIT), Case(Single, **EXACT_VIT | {"model": "vit_drop"})),
    *with_options(BOTH, Case(Single, **ONE_STEP)),
]
TOGETHER = [
    *with_options(GRAPH, *ALGORITHMS, ddp(), ddp(**CLIPPED, accumulate=3), ddp(**MOVED), ddp(**RECIPE)),
    *with_options(
        GRAPH,
        fsdp(),
        fsdp(reshard=False, samples=97),
        fsdp(**RECIPE),
        mesh(shard=None, accumulate=2, **CLIPPED),
        mesh(tp=2, sequence=True, **CLIPPED),
        mesh(tp=2, **ADAMW | {"optimizer": "fused_adamw"}),
        tp(2, **CLIPPED),
    ),
    *with_options(BOTH, fsdp(**EXACT_VIT, **CLIPPED), mesh(tp=2, sequence=True, **EXACT_VIT)),
    *with_options(FUSED, scratch("bucketed"), ddp()),
    *with_options(BOTH, scratch("flat"), scratch("bucketed", samples=97, **RECIPE), ddp(**CLIPPED)),
]


BY_BLOCK = with_options(
    FUSED,
    ddp(accumulate=2, **EXACT_VIT),
    fsdp(**EXACT_VIT, **CLIPPED),
    fsdp(checkpointing="block", **SHORT | EXACT_VIT),
    pipeline("1f1b", **EXACT_VIT),
    ddp_pipeline(2, "1f1b", **EXACT_VIT),
    tp(2, (("head", "replicate"),), **EXACT_VIT),
    mesh(shard=None, **EXACT_VIT),
    mesh(tp=2, sequence=True, **EXACT_VIT, **CLIPPED),
    mesh(pp=2, checkpointing="block", **EXACT_VIT),
)


# Synchronised BatchNorm's collectives break the compiled graph; in one of the two batches some ranks have no sample.
COMPILED_SYNC = with_options(FUSED, scratch(batch_norm="sync", **ONE_STEP), ddp("sync", **EMPTY))


AUTO = Performance("auto", "auto", "auto")
AUTO_ALONE = with_options(AUTO, *PLAIN, Case(Single, **MOVED), Case(Single, **RECIPE), Case(Single, loader="workers"))
AUTO_TOGETHER = with_options(AUTO, *REPLICAS, *MODEL_PARALLEL[2], ddp(**RECIPE), scratch(**MOVED))
AUTO_COMPILED = with_options(AUTO, ddp(epochs=1), scratch("bucketed", epochs=1), Case(Single, epochs=1))


def captured_by_auto(case: Case) -> bool:
    options = dict(case.options)
    on_host = options.get("checkpoint_activations", "none") != "none"
    captured = case.strategy in (Single, Scratch, DDP, FSDP, TP) or (case.strategy is Mesh and options["pp"] == 1)
    return captured and not on_host and case.loader == "device"


def run_automatically(cases: list[Case], device: str, gain: float) -> dict:
    """Run the cases and check which of them were captured, and compiled if compiling saves `gain` of a step."""
    done: list[str] = []

    def noting(what: str, function):
        @wraps(function)
        def noted(*arguments, **more):
            done.append(what)
            return function(*arguments, **more)

        return noted

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    GraphStep.capture = noting("captured", GraphStep.capture)
    fastest.compiling = noting("compiled", fastest.compiling)
    fastest.GAINS = dict.fromkeys(fastest.GAINS, gain)

    def run_and_check(runtime: Runtime, case: Case):
        expected = ["captured"] if captured_by_auto(case) else []
        done.clear()
        outcome = run_case(runtime, case)
        assert done == ([*expected, "compiled", *expected] if gain else expected), f"{name(case)}: {done}"
        return outcome

    training.run_case = run_and_check  # all cases in one call of run_cases: a second group on the same store can hang
    return run_cases(cases, device)


class Group(NamedTuple):
    """Cases that one launch runs on a number of GPUs, each of which must equal `single` on one GPU.

    Attributes:
        cases: by the number of GPUs. Those of a strategy of one process run in one rank.
        run: runs them in a rank.
        arguments: of `run` after the cases.
        tolerance: of the weights.
    """

    cases: dict[int, list[Case]]
    run: Callable[..., dict] = run_cases
    arguments: tuple = ("cuda",)
    tolerance: float = 1e-6


GROUPS = {
    "matrix": Group({size: [*(REPLICAS if size < 8 else []), *cases] for size, cases in MODEL_PARALLEL.items()}),
    "synchronised BatchNorm": Group({2: SYNC, 4: SYNC}, tolerance=1e-9),
    "one process": Group({size: one_process(size) for size in (2, 4)}),
    "options": Group({1: ALONE, 2: TOGETHER, 4: TOGETHER}),
    "compiled by block": Group({2: BY_BLOCK, 4: BY_BLOCK}),
    "compiled, synchronised BatchNorm": Group({2: COMPILED_SYNC, 4: COMPILED_SYNC}, tolerance=1e-9),
    "speed=auto": Group({1: AUTO_ALONE, 2: AUTO_TOGETHER}, run_automatically, ("cuda", 0.0)),
    "speed=auto, which compiles": Group({1: [AUTO_COMPILED[-1]], 2: AUTO_COMPILED[:-1]}, run_automatically, ("cuda", 1e9)),
}


@once
def outcomes(name: str, size: int) -> list[dict]:
    """Return the outcomes of a group on `size` GPUs, for each rank."""
    group = GROUPS[name]
    cases = group.cases[size]
    return run_world(1 if cases[0].strategy.one_process else size, group.run, cases, *group.arguments, timeout=500)


@once
def reference(case: Case):
    return run_world(1, run_cases, [case], "cuda")[0][case]


def options_name(case: Case) -> str:
    return "-".join([name(case), *(key for key, on in case.performance._asdict().items() if on)])


@pytest.mark.parametrize(
    ("group", "case", "size"),
    [
        pytest.param(group, case, size, marks=pytest.mark.gpu(size), id=f"{group}: {options_name(case)} on {size}")
        for group, (by_size, *_) in GROUPS.items()
        for size, cases in by_size.items()
        for case in cases
    ],
)
def test_case_equals_one_gpu(group, case, size):
    ranks, expected = outcomes(group, size), reference(case.reference())
    print(f"{largest_difference(ranks[0][case].weights, expected.weights):.1e}")
    assert_equal(ranks[0][case], expected, GROUPS[group].tolerance)
    if case.strategy in (Scratch, DDP):
        assert len({rank[case].digest for rank in ranks}) == 1, "the replicas drift apart"


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("strategy", ["ddp", "scratch", "pipeline", "ddp_pipeline", "tp strategy.tp=2", "fsdp"])
def test_torchrun_trains_in_bf16_with_a_gpu_for_each_rank(strategy, size, tmp_path):
    line = f"torchrun --standalone --nproc_per_node={size} train.py strategy={strategy} device=cuda precision=bf16"
    code, output = launch(line, "epochs=20", "data.loader=workers", f"runs_dir={tmp_path}", gpus=True)
    assert code == 0, output
    assert f"on {size} x NVIDIA" in output.splitlines()[-1]
    check_run(only_run(tmp_path), epochs=20, strategy=strategy.split()[0], world_size=size)
    assert read_metrics(only_run(tmp_path))[-1]["test_accuracy"] >= 0.9


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("choice", "tf32"), [("highest", False), ("high", True)])
def test_float32_matmul_selects_tf32(choice, tf32, tmp_path):
    line = "python train.py strategy=single speed=off epochs=1 model._target_=own_models.Telling"
    code, output = launch(line, *OWN, f"float32_matmul={choice}", f"runs_dir={tmp_path}", gpus=True)
    assert code == 0, output
    assert f"float32_matmul={choice}, error {'large' if tf32 else 'small'}" in output


@pytest.mark.gpu(2)
@pytest.mark.parametrize("strategy", ["single", "dp", "split"])
def test_python_on_gpus(strategy, tmp_path):
    code, output = launch(f"python train.py strategy={strategy}", "epochs=20", f"runs_dir={tmp_path}", gpus=True)
    assert code == 0, output
    assert "NVIDIA" in output.splitlines()[-1]
    assert read_metrics(only_run(tmp_path))[-1]["test_accuracy"] >= 0.95


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ddp(performance=AUTO), Case(Single)),
        (Case(Single, performance=BOTH), Case(Single, performance=BOTH)),
        (Case(Single), Case(Split, (devices(2), ("num_microbatches", 2)))),
        (Case(Single), ddp(performance=AUTO)),
    ],
    ids=["ddp auto, single", "captured", "single, split", "single, ddp auto"],
)
def test_run_resumes_with_other_options(first, second, tmp_path):
    """The run resumes with the weights and the momentum of the file, not with those of the warm-up steps."""
    second, ranks = replace(second, resume=str(tmp_path / "pt" / "step_00000003.pt")), {True: 1, False: 2}
    first = replace(first, save=str(tmp_path))
    run_world(ranks[first.strategy.one_process], run_cases, [first], "cuda", timeout=120)
    outcome = run_world(ranks[second.strategy.one_process], run_cases, [second], "cuda", timeout=120)[0][second]
    expected = reference(first.reference())
    assert largest_difference(outcome.weights, expected.weights) < 1e-6
    assert largest_difference(outcome.momentum, expected.momentum) < 1e-5


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "line", ["python train.py strategy=single", "torchrun --standalone --nproc_per_node=2 train.py strategy=ddp"]
)
@pytest.mark.parametrize(
    ("overrides", "epochs", "said"),
    [
        (SMALL, 1, ["speed=auto:", "cuda_graph      on", "compile         off"]),
        ([*OWN, "model._target_=own_models.Waiting"], 2, ["the step cannot be captured:"]),
    ],
    ids=["captured", "not captured"],
)
def test_speed_auto_reports_its_choices_once(line, overrides, epochs, said, tmp_path):
    code, output = launch(f"{line} speed=auto", *overrides, f"epochs={epochs}", f"runs_dir={tmp_path}", gpus=True)
    assert code == 0, output
    assert [output.count(words) for words in said] == [1] * len(said), output
    assert len(read_metrics(only_run(tmp_path))) == epochs


@pytest.mark.gpu(1)
def test_model_that_cannot_be_captured_is_an_error_if_the_config_requires_it(tmp_path):
    more = [*OWN, "model._target_=own_models.Waiting", "cuda_graph=true", f"runs_dir={tmp_path}"]
    code, output = launch("python train.py", *more, gpus=True)
    assert code != 0, output


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("fault", "restarts", "code", "status", "said"),
    [
        ("crash", 1, 0, "finished", "started again after error: rank 1 on"),
        ("crash", 0, 1, "failed", "exited without reporting an error"),
        ("hang", 0, 1, "failed", "hangs: no progress for"),
        ("nan", 0, 1, "failed", "the loss of step 8 (epoch 2) is not finite, on rank 1 first"),
        ("sigterm", 0, 0, "preempted", "preempted at epoch"),
    ],
)
def test_faults_on_gpus(fault, restarts, code, status, said, tmp_path):
    """NCCL waits forever for a rank that has died, while gloo detects it."""
    line = f"torchrun --standalone --nproc_per_node=2 --max-restarts={restarts} train.py strategy=fsdp"
    overrides = [f"runs_dir={tmp_path}", "timeout=5", f"inject={fault}@rank=1,step=8", "epochs=200"]
    ended, output = launch(line, *SMALL, *overrides, gpus=True)
    assert ended == code, output
    assert said in output
    assert json.loads((only_run(tmp_path) / "status.json").read_text())["status"] == status


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("python train.py device=cuda:99", "device=cuda:99: there is no such device on"),
        (
            "python train.py strategy=split strategy.devices=[cuda:0,cuda:99]",
            "strategy.devices=cuda:99: there is no such device on",
        ),
        ("torchrun --standalone --nproc_per_node=9 train.py strategy=ddp batch_size=63", "9 ranks on"),
        ("torchrun --standalone --nproc_per_node=2 train.py strategy=ddp device=cuda:0", "2 ranks on"),
    ],
)
def test_missing_gpus_are_an_error_that_lists_the_available_ones(line, message, tmp_path):
    code, output = launch(line, *SMALL[:-2], f"runs_dir={tmp_path}", gpus=True)
    assert code != 0
    assert output.count(message) == 1, output
    assert "cuda:0 (NVIDIA" in output, "the message does not list the available GPUs"
