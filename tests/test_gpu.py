"""The equivalence matrix and the launch commands on GPUs, with NCCL.

A test is skipped with fewer GPUs than it needs.

python -m pytest -m gpu tests/test_gpu.py -n 10 --dist worksteal

With fewer processes, or without worksteal, one process ends up with several of the longest tests.
"""

import json
import math
import os
import re
import tempfile
from collections.abc import Callable
from functools import partial, wraps
from typing import NamedTuple

import pytest
import torch
import training
from case import Case, reference_of
from cases import MATRIX, assert_equal, tolerance_of
from fp16 import FITTING, LARGE, in_fp16
from in_bf16 import CHUNKS, SETTINGS, assert_chunks_round_no_more, run_in_bf16
from launches import OWN, SMALL, launch, only_run, read_metrics
from run_checks import check_run
from torch import nn
from torch.nn import MSELoss
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import TensorDataset
from training import ONE_PROCESS, Outcome, largest_difference, run_case, run_cases
from worlds import once, run_world

from ddp_lab import Lab, gather, own_rows
from ddp_lab.observe.metrics_file import read_rows
from ddp_lab.speed import fastest
from ddp_lab.speed.cuda_graph import GraphStep
from ddp_lab.strategies.scratch import NAMES
from ddp_lab.tasks import chunked_loss
from ddp_lab.tasks.chunked_loss import add_product, adds_in_float32
from ddp_lab.world.runtime import Runtime

WORLDS = [pytest.param(size, marks=pytest.mark.gpu(size)) for size in (2, 4)]
BY_SIZE = {
    # Worker processes decode files, which is the same on any device.
    size: [
        str(case)
        for case in MATRIX
        if size in case.ranks + case.slow + case.extra and "files" not in case.settings
    ]
    for size in (2, 4, 8)
}
GRAPH = "cuda_graph=true"
FUSED = "compile=true channels_last=true"
BOTH = f"{GRAPH} {FUSED}"
AUTO = "speed=auto"
# The fused optimizer of a graph requires float32. Compiled kernels round differently, which changes
# the sign of a ReLU's input: after 15 steps the weights differ by 4e-6 in float32, and by 3e-17 in
# float64 (an H200).
MOVED = "data.crop_padding=2 data.flip=true"
EXACT_VIT = "vit float64"
# A fused optimizer reads the rate of a graph in float32, which 0.0625 is exactly.
EXACT_RATE = "scheduler=constant warmup_epochs=0 optimizer.lr=0.0625"
# Each group has a learning rate of its own on the device, ten times that of the others.
GROUPED = 'optimizer.groups=[{"match":"*.bias","lr_scale":10}]'
# 500 steps of at least 40 ms, in all of which rank 1 computes twice as long
SLOW_GPU = [*OWN, "model._target_=slow_ranks.Busy", "data.dataset.train_size=12000", "epochs=1"]
SLOW_GPU += ["straggler.seconds=4", "straggler.slower=0.5", "tracker=none"]
SYNC = "batch_norm=sync resnet18 step"


def one_process(size: int) -> list[str]:
    devices = f"devices=[{','.join(f'cuda:{i}' for i in range(size))}]"
    splits = [
        f"split {devices} num_microbatches={m}"
        for m in ("1", "4", "5 samples=97 data.loader=workers focal")
    ]
    splits.append(f"split {devices} num_microbatches=2 tied_head accumulate=2")
    splits.append(f"split {devices} num_microbatches=2 vit float64 compile=true")
    # In float32 the weights of 97 samples differ by 7e-6, in float64 by 6e-17 (two H100s,
    # 2026-11-25).
    return [f"dp {devices}", f"dp {devices} samples=97 data.loader=workers float64", *splits]


def each(options: str, *cases: str) -> list[str]:
    return [f"{case} {options}" for case in cases]


PLAIN = ["single", "single clipped accumulate=3"]
ALONE = [case for options in (GRAPH, FUSED, BOTH) for case in each(options, *PLAIN)]
ALONE += each(GRAPH, f"single {MOVED}", "single recipe")
# A graph that repeated the decay of its capture would differ from the first steps on; here it takes
# 51.
ALONE += each(GRAPH, "single ema=0.999 epochs=17", "single ema=0.999 ema_warmup=false epochs=17")
ALONE += each(BOTH, "single augmented", "single accumulate=3 recipe", "single resnet18 step")
ALONE += each(BOTH, f"single {EXACT_VIT}", "single vit_drop float64")
RECOMPUTED = "checkpoint_activations=block"
ALONE += each(f"{GRAPH} {RECOMPUTED}", "single accumulate=3 clipped", "single vit float64")
ALONE += each(f"{BOTH} {RECOMPUTED}", f"single {EXACT_VIT}")
ALONE += each(f"{GRAPH} {GROUPED}", "single", "single adamw optimizer.fused=true undecayed")
ALONE += each(f"{BOTH} {GROUPED}", f"single {EXACT_VIT} optimizer.layer_decay=0.5")
CHUNKED = ("accumulate=3 tokens", "one_left clipped", "tied_head float64")
ALONE += each(CHUNKS, *(f"single {settings}" for settings in CHUNKED))
ALONE += each(f"{GRAPH} {CHUNKS} {EXACT_RATE}", *(f"single {settings}" for settings in CHUNKED))
ALONE += each(f"{BOTH} {CHUNKS}", *(f"single {settings} float64" for settings in CHUNKED))
# In float64 the iteration has no bf16, in which a last digit changes an update by 0.4 %.
MUON = "optimizer=muon optimizer.ns_dtype=float32"
ALONE += each(f"{GRAPH} {MUON}", f"single {EXACT_VIT}", f"single {EXACT_VIT} accumulate=3 clipped")
ALGORITHMS = [f"scratch algorithm={name}" for name in NAMES]
TOGETHER = [
    *each(
        GRAPH,
        *ALGORITHMS,
        "ddp",
        "ddp clipped accumulate=3",
        f"ddp {MOVED}",
        "ddp recipe",
        "tp tp=2 clipped",
    ),
    *each(f"{GRAPH} {RECOMPUTED}", "ddp accumulate=2 vit float64", "fsdp vit float64 clipped"),
    *each(GRAPH, "fsdp", "fsdp recipe"),
    *each(
        f"{GRAPH} {EXACT_RATE}",
        "fsdp units=Containers clipped",
        # In float32 the weights of 97 samples differ by 6e-6 on four GPUs (H200s, 2026-11-28).
        "fsdp reshard_after_forward=false samples=97 float64",
    ),
    *each(
        GRAPH,
        "mesh shard=null accumulate=2 short clipped",
        "mesh tp=2 sequence_parallel=true short clipped",
    ),
    *each(
        GRAPH,
        "mesh tp=2 short adamw optimizer.fused=true",
        "tp tp=2 vit clipped",
        "tp tp=2 vit accumulate=2 recipe",
    ),
    *each(
        f"{GRAPH} {CHUNKS}",
        "scratch algorithm=bucketed tied_head accumulate=2",
        "ddp one_left clipped",
        "fsdp tied_head accumulate=2",
        "mesh shard=null one_left",
    ),
    # The optimizer of shards is not compiled, but fused.
    *each(
        f"float64 {BOTH} {CHUNKS} {EXACT_RATE}",
        "ddp tied_head accumulate=2",
        "fsdp one_left clipped",
        f"fsdp tokens {RECOMPUTED}",
    ),
    *each(f"{GRAPH} {GROUPED}", "ddp", "fsdp", "tp tp=2 vit"),
    *each(f"{GRAPH} {MUON}", f"ddp {EXACT_VIT}", f"fsdp {EXACT_VIT}"),
    *each(BOTH, "tp tp=2 vit float64 clipped", "mesh tp=2 short float64"),
    *each(BOTH, f"fsdp {EXACT_VIT} clipped", "mesh tp=2 sequence_parallel=true short float64"),
    *each(FUSED, "scratch algorithm=bucketed", "ddp"),
    # The steps differ, so nothing is captured.
    *each(
        GRAPH,
        "ddp find_unused_parameters=true experts",
        "scratch find_unused_parameters=true experts almost-empty",
    ),
    *each(
        GRAPH,
        "scratch find_unused_parameters=true algorithm=bucketed bucket_mb=0.0001 experts "
        "accumulate=2 clipped",
    ),
    *each(BOTH, "scratch", "scratch algorithm=bucketed samples=97 recipe", "ddp clipped"),
]
# A pipeline's step is captured with its messages. All cases but the vit's have a partial last
# batch, and evaluations between the epochs in eager mode.
PIPELINES = [
    *each(
        GRAPH, "pipeline clipped accumulate=3", "pipeline schedule=gpipe num_microbatches=24 recipe"
    ),
    *each(
        GRAPH,
        "pipeline schedule=interleaved1f1b accumulate=2 clipped",
        "pipeline schedule=interleavedzerobubble",
    ),
    *each(
        GRAPH,
        "pipeline num_microbatches=5 vit_drop",
        "pipeline ema=0.999 epochs=17 float64",
        "pipeline accumulate=2 tokens",
        "pipeline accumulate=2 tied_head",
    ),
    *each(
        GRAPH,
        "pipeline adamw optimizer.fused=true almost-empty",
        "pipeline on_nan=skip num_microbatches=7",
    ),
    *each(GRAPH, f"pipeline {MOVED}", "pipeline cut=[fc1] partly_frozen clipped"),
    *each(GRAPH, "ddp_pipeline accumulate=2 clipped", "ddp_pipeline pp=1 schedule=gpipe recipe"),
    *each(
        GRAPH,
        "mesh pp=2 accumulate=2 short clipped",
        "mesh pp=2 num_microbatches=5 vit recipe almost-empty",
    ),
    *each(GRAPH, "mesh pp=2 schedule=interleaved1f1b vit adamw optimizer.fused=true"),
    *each(GRAPH, "mesh pp=2 tied_head"),
    *each(f"{GRAPH} {GROUPED}", "pipeline"),
    *each(
        f"float64 {BOTH}",
        "pipeline vit clipped",
        "pipeline schedule=interleaved1f1b vit",
        "ddp_pipeline vit recipe",
    ),
    *each(f"float64 {BOTH}", "mesh pp=2 vit clipped"),
]
BY_BLOCK = each(
    f"float64 {FUSED}",
    "ddp accumulate=2 vit",
    "fsdp vit clipped",
    "fsdp checkpoint_activations=block short",
    "pipeline vit",
    "ddp_pipeline vit",
    "tp tp=2 vit",
    "mesh tp=2 short clipped",
    "mesh shard=null short",
    "mesh tp=2 sequence_parallel=true short clipped",
    "mesh pp=2 checkpoint_activations=block short",
)
# Synchronised BatchNorm's collectives break the compiled graph; in one of the two batches some
# ranks have no sample.
COMPILED_SYNC = each(FUSED, f"scratch {SYNC}", f"ddp {SYNC} samples=25")
AUTO_ALONE = each(AUTO, *PLAIN, f"single {MOVED}", "single recipe", "single data.loader=workers")
AUTO_TOGETHER = [
    *each(
        AUTO,
        f"scratch {MOVED}",
        "scratch samples=97 data.loader=workers",
        "ddp recipe",
        "ddp accumulate=3 clipped",
    ),
    *each(
        AUTO,
        "fsdp",
        "fsdp accumulate=2 clipped",
        "pipeline",
        "ddp_pipeline",
        "tp tp=2 accumulate=2 clipped",
    ),
    *each(AUTO, "tp tp=2 vit clipped"),
    *each(AUTO, "mesh tp=2 sequence_parallel=true short clipped", "mesh pp=2 accumulate=2 short"),
    *each(AUTO, "mesh shard=null checkpoint_activations=block accumulate=2 short clipped"),
]
AUTO_COMPILED = each(f"epochs=1 {AUTO}", "ddp", "scratch algorithm=bucketed")


def captured_by_auto(case: str) -> bool:
    return "data.loader=workers" not in Case.of(case).parts


def run_automatically(cases: list[str], device: str, compiles: bool) -> dict:
    """Run the cases and check which of them were captured, and compiled if `compiles`."""
    done: list[str] = []

    def noting(event: str, function):
        @wraps(function)
        def noted(*arguments, **more):
            done.append(event)
            return function(*arguments, **more)

        return noted

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    GraphStep.capture = noting("captured", GraphStep.capture)
    fastest.compiling = noting("compiled", fastest.compiling)
    fastest.WORTH_FROM = -math.inf if compiles else math.inf

    def run_and_check(runtime: Runtime, case: str):
        expected = ["captured"] if captured_by_auto(case) else []
        done.clear()
        outcome = run_case(runtime, case)
        assert done == ([*expected, "compiled", *expected] if compiles else expected), (
            f"{case}: {done}"
        )
        return outcome

    # all cases in one call of run_cases: a second group on the same store can hang
    training.run_case = run_and_check
    return run_cases(cases, device)


class Group(NamedTuple):
    """Cases that one launch runs on a number of GPUs, each of which must equal `single` on one GPU.

    Attributes:
        cases: by the number of GPUs. Those of a strategy of one process run in one rank.
        run: runs them in a rank.
        arguments: of `run` after the cases.
    """

    cases: dict[int, list[str]]
    run: Callable[..., dict] = run_cases
    arguments: tuple = ("cuda",)


GROUPS = {
    "matrix": Group(BY_SIZE),
    "synchronised BatchNorm": Group(
        {4: [f"{strategy} {SYNC}" for strategy in ("scratch", "ddp", "fsdp", "tp tp=2")]}
    ),
    "one process": Group({size: one_process(size) for size in (2, 4)}),
    "options": Group({1: ALONE, 2: TOGETHER, 4: TOGETHER}),
    "captured pipelines": Group({2: PIPELINES}),
    "compiled by block": Group({2: BY_BLOCK, 4: BY_BLOCK}),
    "compiled, synchronised BatchNorm": Group({2: COMPILED_SYNC, 4: COMPILED_SYNC}),
    "speed=auto": Group({1: AUTO_ALONE, 2: AUTO_TOGETHER}, run_automatically, ("cuda", False)),
    "speed=auto, which compiles": Group(
        {1: ["single epochs=1 speed=auto"], 2: AUTO_COMPILED}, run_automatically, ("cuda", True)
    ),
}


@once
def alone(*cases: str) -> dict[str, Outcome]:
    return run_world(1, run_cases, list(cases), "cuda", timeout=500)[0]


@pytest.mark.parametrize(
    ("group", "strategy", "size"),
    [
        pytest.param(
            group, strategy, size, marks=pytest.mark.gpu(size), id=f"{group}: {strategy} on {size}"
        )
        for group, (by_size, *_) in GROUPS.items()
        for size, cases in by_size.items()
        for strategy in dict.fromkeys(case.split()[0] for case in cases)
    ],
)
def test_cases_equal_one_gpu(group, strategy, size):
    """The cases of a strategy share a world.

    NCCL keeps 0.8 GiB for each group of ranks until the world ends.
    """
    by_size, run, arguments = GROUPS[group]
    cases = [case for case in by_size[size] if case.split()[0] == strategy]
    ranks = run_world(1 if strategy in ONE_PROCESS else size, run, cases, *arguments, timeout=500)
    expected = alone(*dict.fromkeys(map(reference_of, cases)))
    wrong = {}
    for case in cases:
        try:
            assert_equal(ranks[0][case], expected[reference_of(case)], tolerance_of(case))
            if strategy in ("scratch", "ddp"):
                assert len({rank[case].digest for rank in ranks}) == 1, "the replicas drift apart"
        except AssertionError as error:
            wrong[case] = str(error).partition("\n")[0]
    assert not wrong


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize(
    "strategy", ["ddp", "scratch", "pipeline", "ddp_pipeline", "tp strategy.tp=2", "fsdp"]
)
def test_torchrun_trains_in_bf16_with_a_gpu_for_each_rank(strategy, size, tmp_path):
    line = (
        f"torchrun --standalone --nproc_per_node={size} train.py strategy={strategy} device=cuda "
        "precision=bf16"
    )
    code, output = launch(
        line, "epochs=20", "data.loader=workers", f"runs_dir={tmp_path}", gpus=True
    )
    assert code == 0, output
    assert f"on {size} x NVIDIA" in output.splitlines()[-1]
    name = strategy.split()[0]
    energy = "energy_kWh joules_per_sample"
    check_run(only_run(tmp_path), epochs=20, strategy=name, world_size=size, also=energy)
    assert read_metrics(only_run(tmp_path))[-1]["test_accuracy"] >= 0.9


def check_captured_in_fp16(size: int, cases: dict[str, list[str]]) -> None:
    """Check that captured steps skip and compute what eager ones do, under the same strategy."""
    lines = [line for eager, captured in cases.items() for line in [eager, *captured]]
    for rank in run_world(size, in_fp16, lines, [FITTING, LARGE], "cuda", timeout=300):
        for eager, captured in cases.items():
            expected, _ = rank[eager, FITTING]
            _, scale = rank[eager, LARGE]
            assert 0 < scale["skipped_steps"] < 6, eager
            for line in captured:
                outcome, fitting = rank[line, FITTING]
                assert fitting["skipped_steps"] == 0
                assert rank[line, LARGE][1] == scale, line
                if expected.weights:
                    assert largest_difference(outcome.weights, expected.weights) < 1e-3, line


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        pytest.param("single", 1, marks=pytest.mark.gpu(1)),
        pytest.param("ddp", 2, marks=pytest.mark.gpu(2)),
        pytest.param("fsdp", 2, marks=pytest.mark.gpu(2)),
    ],
)
def test_head_chunks_in_bf16_round_no_more_than_all_logits(strategy, size):
    whole = [f"{strategy} {settings}" for settings in SETTINGS]
    in_chunks = [f"{strategy} {settings} {CHUNKS}" for settings in SETTINGS]
    options = ("", f" {GRAPH}", f" {BOTH}")  # eager, captured, captured and compiled
    lines = [*whole, *(f"{line}{option}" for line in in_chunks for option in options)]
    outcomes = run_world(size, run_in_bf16, lines, "cuda", timeout=500)[0]
    exact = alone(*map(reference_of, whole))
    wrong = {}
    for expected, chunked in zip(whole, in_chunks, strict=True):
        for option in options:
            line = f"{chunked}{option}"
            try:
                assert_chunks_round_no_more(
                    outcomes[line], outcomes[expected], exact[reference_of(expected)]
                )
            except AssertionError as error:
                wrong[line] = str(error)
    assert not wrong


@pytest.mark.gpu(1)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("classes", "rows", "width"), [(11, 3001, 16), (50_304, 4097, 768)])
def test_product_of_half_precision_is_added_to_float32_unrounded(classes, rows, width, half):
    """The sums are integers that float32 holds, and neither bf16 nor float16 does."""
    assert adds_in_float32(torch.Tensor, half, torch.device("cuda")), "torch rounds the product"
    logits, hidden, total, expected = product_of_integers(classes, rows, width, half)
    add_product(total, logits.t(), hidden)
    assert torch.equal(total.double(), expected)
    assert not torch.equal(expected.to(half).double(), expected)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_product_is_added_where_torch_cannot_add_it_to_float32(half, monkeypatch):
    monkeypatch.setattr(chunked_loss, "adds_in_float32", lambda *arguments: False)
    logits, hidden, total, expected = product_of_integers(11, 3001, 16, half)
    before = total.double()
    add_product(total, logits.t(), hidden)
    error = (total.double() - expected).abs()
    assert error.max() > 0
    assert (error <= torch.finfo(half).eps * (expected - before)).all()


def product_of_integers(
    classes: int, rows: int, width: int, half: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits, hidden, a total, and the total with the product of the two, in float64."""
    generator = torch.Generator("cuda").manual_seed(1)
    integers = partial(torch.randint, 0, 4, device="cuda", generator=generator)
    logits = integers((rows, classes)).to(half)
    hidden = integers((rows, width)).to(half)
    total = integers((classes, width)).float()
    return logits, hidden, total, total.double() + logits.double().t() @ hidden.double()


@pytest.mark.gpu(1)
def test_captured_step_in_fp16_skips_what_an_eager_one_does():
    adamw = "single optimizer=adamw optimizer.lr=0.01"
    cases = {
        "single": [f"single {GRAPH}"],
        "single clipped accumulate=2": [f"single clipped accumulate=2 {GRAPH}"],
        "single vit": [f"single vit {GRAPH}"],
        adamw: [f"{adamw} {GRAPH}"],
        # A compiled kernel keeps in float32 what overflows between two eager ones in float16, so
        # other steps are skipped.
        f"single {FUSED}": [f"single {BOTH}"],
        f"single vit {FUSED}": [f"single vit {BOTH}"],
    }
    check_captured_in_fp16(1, cases)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("strategy", ["ddp", "scratch", "fsdp", "pipeline", "tp tp=2 vit"])
def test_ranks_in_fp16_skip_the_same_steps_captured_and_eager(strategy):
    check_captured_in_fp16(2, {strategy: [f"{strategy} {GRAPH}"]})


@pytest.mark.gpu(2)
@pytest.mark.parametrize("options", ["speed=off", "cuda_graph=true"])
@pytest.mark.parametrize("strategy", ["ddp", "scratch", "fsdp"])
def test_slow_gpu_is_named_where_work_is_timed(strategy, options, tmp_path):
    line = f"python -m ddp_lab train --nproc 2 strategy={strategy} {options} {' '.join(SLOW_GPU)}"
    code, output = launch(f"{line} runs_dir={tmp_path}", gpus=True)
    assert code == 0, output
    rows = read_rows(only_run(tmp_path) / "metrics.jsonl")
    named = [(row["rank"], row["part"]) for row in rows if row["kind"] == "straggler"]
    assert named == ([] if strategy == "fsdp" else [(1, "compute")])


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
    code, output = launch(
        f"python train.py strategy={strategy}", "epochs=20", f"runs_dir={tmp_path}", gpus=True
    )
    assert code == 0, output
    assert "NVIDIA" in output.splitlines()[-1]
    assert read_metrics(only_run(tmp_path))[-1]["test_accuracy"] >= 0.95


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ddp speed=auto", "single"),
        (f"single {BOTH}", f"single {BOTH}"),
        ("single", "split devices=[cuda:0,cuda:1] num_microbatches=2"),
        ("single", "ddp speed=auto"),
        (f"pipeline {GRAPH}", "single"),
        ("single", f"pipeline schedule=interleaved1f1b {GRAPH}"),
    ],
)
def test_run_resumes_with_other_options(first, second, tmp_path):
    """The run resumes with the weights and the momentum of the file, not of the warm-up steps."""
    second = f"{second} resume={tmp_path}/pt/step_00000003.pt"
    for case in (f"{first} save={tmp_path}", second):
        size = 1 if case.split()[0] in ONE_PROCESS else 2
        outcome = run_world(size, run_cases, [case], "cuda", timeout=120)[0][case]
    expected = alone(reference_of(first))[reference_of(first)]
    assert largest_difference(outcome.weights, expected.weights) < 1e-6
    assert largest_difference(outcome.momentum, expected.momentum) < 1e-5


@pytest.mark.gpu(2)
def test_captured_pipeline_drops_what_the_eager_one_does():
    """The stages draw other masks than one device, but a replay the same ones as an eager step."""
    eager = "pipeline regression model.dropout=0.5 float64"
    captured = f"{eager} {GRAPH}"
    outcomes = run_world(2, run_cases, [eager, captured, f"{eager} seed=8"], "cuda", timeout=120)[0]
    assert largest_difference(outcomes[captured].weights, outcomes[eager].weights) < 1e-6
    assert largest_difference(outcomes[f"{eager} seed=8"].weights, outcomes[eager].weights) > 1e-3


def own_steps(strategy: str) -> list[float]:
    """Return the losses of steps that a loop makes of parts, with a loss over the GLOBAL batch."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.rand(25, 6, generator=generator, dtype=torch.float64)
    dataset = TensorDataset(samples, torch.zeros(25))
    losses = []
    with Lab(strategy, device="cuda", timeout=60) as lab:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        trainer = lab.trainer(model, MSELoss(), partial(SGD, lr=0.5), batch_size=12)
        for epoch in range(2):
            for inputs, _ in trainer.batches(dataset, epoch):
                noise = 0.1 * trainer.randn(len(inputs), 6, name="noise").double()
                first, second = trainer.forward(inputs + noise).chunk(2, 1)
                similarity = first @ gather(second).T
                of_rows = cross_entropy(similarity, own_rows(), reduction="none")
                trainer.backward(of_rows.sum(), len(of_rows))
                losses.append(float(trainer.update()))
    return losses


@pytest.mark.gpu(2)
@pytest.mark.parametrize("strategy", ["scratch", "ddp", "fsdp"])
def test_own_steps_gather_the_batch_of_all_gpus(strategy):
    (expected,) = run_world(1, own_steps, "single", timeout=120)
    for losses in run_world(2, own_steps, strategy, timeout=120):
        assert losses == pytest.approx(expected, abs=1e-12)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "line",
    [
        "python train.py strategy=single",
        "torchrun --standalone --nproc_per_node=2 train.py strategy=ddp",
        "torchrun --standalone --nproc_per_node=2 train.py strategy=pipeline",
    ],
)
@pytest.mark.parametrize(
    ("overrides", "epochs", "said"),
    [
        (SMALL, 1, ["speed=auto:", "cuda_graph      on", "compile         off"]),
        ([*OWN, "model._target_=own_models.waiting_blocks"], 2, ["the step cannot be captured:"]),
    ],
    ids=["captured", "not captured"],
)
def test_speed_auto_reports_its_choices_once(line, overrides, epochs, said, tmp_path):
    code, output = launch(
        f"{line} speed=auto", *overrides, f"epochs={epochs}", f"runs_dir={tmp_path}", gpus=True
    )
    assert code == 0, output
    assert [output.count(words) for words in said] == [1] * len(said), output
    assert len(read_metrics(only_run(tmp_path))) == epochs


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
    line = (
        f"torchrun --standalone --nproc_per_node=2 --max-restarts={restarts} train.py strategy=fsdp"
    )
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
        (
            "torchrun --standalone --nproc_per_node=9 train.py strategy=ddp batch_size=63",
            "9 ranks on",
        ),
        (
            "torchrun --standalone --nproc_per_node=2 train.py strategy=ddp device=cuda:0",
            "2 ranks on",
        ),
    ],
)
def test_missing_gpus_are_an_error_that_lists_the_available_ones(line, message, tmp_path):
    code, output = launch(line, *SMALL[:-2], f"runs_dir={tmp_path}", gpus=True)
    assert code != 0
    assert output.count(message) == 1, output
    assert "cuda:0 (NVIDIA" in output, "the message does not list the available GPUs"


# Warnings that the machine may deserve.
OF_MACHINE = {"peer access", "shared memory", "libraries"}
PAIR = r"^ok       pair 0-1: (\S+) GB/s, "


@pytest.mark.gpu(2)
def test_doctor_measures_the_link_between_two_gpus(tmp_path):
    line = "python -m ddp_lab doctor --fabric --nproc 2"
    code, output = launch(line, f"runs_dir={tmp_path}", gpus=True)
    assert code == 0, output
    rate, link = re.search(rf"{PAIR}(.*)$", output, re.MULTILINE).groups()
    assert float(rate) > 1, "GB/s"
    assert link.startswith(("NVLink (NV", "PCIe")), link
    warnings = set(re.findall(r"^warning  (.*?): ", output, re.MULTILINE))
    assert warnings <= OF_MACHINE, output
    assert re.search(r"^ok       clocks: 2 busy GPUs run at", output, re.MULTILINE), output


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "command", ["train.py strategy=ddp epochs=1", "-m ddp_lab doctor --fabric"]
)
def test_ranks_that_see_one_gpu_each_use_it(command, tmp_path):
    """As with Slurm's --gpus-per-task."""
    program = f"CUDA_VISIBLE_DEVICES=$LOCAL_RANK exec python {command} runs_dir={tmp_path}"
    line = "torchrun --standalone --nproc_per_node=2 --no-python sh -c"
    code, output = launch(line, program, gpus=True)
    assert code == 0, output
    if "doctor" in command:
        assert float(re.search(PAIR, output, re.MULTILINE)[1]) > 1, "GB/s"
    else:
        assert math.isfinite(read_metrics(only_run(tmp_path))[-1]["test_loss"])
