"""The equivalence matrix and the launch commands on GPUs, with NCCL. A test is skipped with fewer GPUs than it needs.

python -m pytest -m gpu
"""

import json
import os
import tempfile
from copy import deepcopy
from dataclasses import replace
from functools import wraps

import pytest
import torch
import training
from cases import (
    ADAMW,
    AUGMENTED,
    CLIPPED,
    FOCAL,
    HALF,
    OFFLOADED,
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
from torch import nn
from training import OFF, Case, Performance, largest_difference, run_case, run_cases
from worlds import once, run_world

from ddp_lab.models.vit import vit
from ddp_lab.speed import fastest
from ddp_lab.speed.compile import CHANNELS_LAST, COMBO
from ddp_lab.speed.convolution import pad_convolutions
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
        *(pipeline(schedule) for schedule in ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble")),
        pipeline("1f1b", m=5, samples=97, **CLIPPED),
        ddp_pipeline(2, "1f1b"),
        tp(2, samples=97),
        tp(2, accumulate=2, **CLIPPED),
        mesh(shard=None, checkpointing="selective", accumulate=2, **CLIPPED),
        mesh(tp=2, sequence=True, **CLIPPED),
        mesh(pp=2, checkpointing="block", accumulate=2),
        mesh(tp=2, sequence=True, **ADAMW | {"optimizer": "fused_adamw"}),
        OFFLOADED,
        mesh(shard=None, offload=True, **ADAMW, **CLIPPED),
        mesh(tp=2, sequence=True, offload=True, **CLIPPED),
        mesh(pp=2, offload=True, accumulate=2, **CLIPPED),
    ],
    4: [
        pipeline("gpipe"),
        pipeline("1f1b", m=5, **CLIPPED),
        *(ddp_pipeline(2, schedule) for schedule in ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs")),
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
BY_SIZE = [
    pytest.param(case, size, marks=pytest.mark.gpu(size), id=f"{name(case)}-on-{size}")
    for size, cases in MODEL_PARALLEL.items()
    for case in [*(REPLICAS if size < 8 else []), *cases]
]
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


@once
def reference(case: Case):
    return run_world(1, run_cases, [case], "cuda")[0][case]


@once
def world(size: int) -> list[dict]:
    cases = [*REPLICAS, *SYNC] if size < 8 else []
    return run_world(size, run_cases, cases + MODEL_PARALLEL[size], "cuda", timeout=240)


@once
def alone(size: int) -> dict:
    return run_world(1, run_cases, one_process(size), "cuda")[0]


@pytest.mark.parametrize(("case", "size"), BY_SIZE)
def test_several_processes_equal_one_gpu(case, size):
    outcome, expected = world(size)[0][case], reference(case.reference())
    print(f"{name(case)} on {size}: {largest_difference(outcome.weights, expected.weights):.1e}")
    assert_equal(outcome, expected)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("case", SYNC, ids=name)
def test_synchronised_batch_norm_takes_one_gpus_step(case, size):
    outcome, expected = world(size)[0][case], reference(case.reference())
    print(f"{name(case)} on {size}: {largest_difference(outcome.weights, expected.weights):.1e}")
    assert_equal(outcome, expected, tolerance=1e-9)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("index", range(5))
def test_one_process_over_gpus_equals_one_gpu(index, size):
    case = one_process(size)[index]
    outcome, expected = alone(size)[case], reference(case.reference())
    print(f"{name(case)} on {size}: {largest_difference(outcome.weights, expected.weights):.1e}")
    assert_equal(outcome, expected)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("strategy", ["ddp", "scratch", "pipeline", "ddp_pipeline", "tp strategy.tp=2", "fsdp"])
def test_torchrun_with_a_gpu_for_each_rank(strategy, size, tmp_path):
    line = f"torchrun --standalone --nproc_per_node={size} train.py strategy={strategy} device=cuda"
    code, output = launch(line, "epochs=2", "data.loader=workers", f"runs_dir={tmp_path}", gpus=True)
    assert code == 0, output
    assert f"on {size} x NVIDIA" in output.splitlines()[-1]
    check_run(only_run(tmp_path), epochs=2, strategy=strategy.split()[0], world_size=size)


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("choice", "tf32"), [("highest", False), ("high", True)])
def test_float32_matmul_selects_tf32_and_is_logged(choice, tf32, tmp_path):
    line = "python train.py strategy=single speed=off epochs=1 model._target_=own_models.Telling"
    code, output = launch(line, *OWN, f"float32_matmul={choice}", f"runs_dir={tmp_path}", gpus=True)
    assert code == 0, output
    assert f"float32_matmul={choice}, error {'large' if tf32 else 'small'}" in output
    assert (
        output.count(f"float32_matmul={choice}: float32 matrix multiplications use {'TF32' if tf32 else 'full precision'}") == 1
    )


@pytest.mark.gpu(2)
@pytest.mark.parametrize("strategy", ["single", "dp", "split"])
def test_python_on_gpus(strategy, tmp_path):
    code, output = launch(f"python train.py strategy={strategy}", "epochs=20", f"runs_dir={tmp_path}", gpus=True)
    assert code == 0, output
    assert "NVIDIA" in output.splitlines()[-1]
    assert read_metrics(only_run(tmp_path))[-1]["test_accuracy"] >= 0.95


@pytest.mark.gpu(2)
@pytest.mark.parametrize("strategy", ["ddp", "pipeline", "tp", "fsdp"])
def test_bf16(strategy, tmp_path):
    line = f"torchrun --standalone --nproc_per_node=2 train.py strategy={strategy} precision=bf16"
    code, output = launch(line, f"runs_dir={tmp_path}", gpus=True)
    assert code == 0, output
    assert read_metrics(only_run(tmp_path))[-1]["test_accuracy"] >= 0.9


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
    *with_options(FUSED, Case(Single, **AUGMENTED)),
    *with_options(BOTH, Case(Single, **AUGMENTED), Case(Single, accumulate=3, **RECIPE)),
    *with_options(BOTH, Case(Single, **EXACT_VIT), Case(Single, **EXACT_VIT | {"model": "vit_drop"})),
    *with_options(BOTH, Case(Single, **ONE_STEP)),
]
TOGETHER = [
    *with_options(
        GRAPH, *ALGORITHMS, ddp(), ddp(view=False, static=True), ddp(**CLIPPED, accumulate=3), ddp(**MOVED), ddp(**RECIPE)
    ),
    *with_options(
        GRAPH,
        fsdp(),
        fsdp(reshard=False, samples=97),
        fsdp(accumulate=2, **CLIPPED),
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


BY_BLOCK_CASES = with_options(
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


@once
def compiled_by_block(size: int) -> list[dict]:
    return run_world(size, run_cases, BY_BLOCK_CASES, "cuda", timeout=500)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("case", BY_BLOCK_CASES, ids=name)
def test_strategies_compiled_by_block_equal_one_gpu(case, size):
    outcome, expected = compiled_by_block(size)[0][case], reference(case.reference())
    print(f"{name(case)} on {size}: {largest_difference(outcome.weights, expected.weights):.1e}")
    assert_equal(outcome, expected)


@once
def graphed(size: int) -> list[dict]:
    return run_world(size, run_cases, ALONE if size == 1 else TOGETHER, "cuda", timeout=300)


# Synchronised BatchNorm's collectives break the compiled graph; in one of the two batches some ranks have no sample.
COMPILED_SYNC = with_options(FUSED, scratch(batch_norm="sync", **ONE_STEP), ddp("sync", **EMPTY))


@once
def compiled_sync(size: int) -> list[dict]:
    return run_world(size, run_cases, COMPILED_SYNC, "cuda", timeout=300)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("case", COMPILED_SYNC, ids=name)
def test_compiled_synchronised_batch_norm_takes_one_gpus_step(case, size):
    assert_equal(compiled_sync(size)[0][case], reference(case.reference()), tolerance=1e-9)


def results_of(model: nn.Module, images: torch.Tensor, dtype: torch.dtype, compiled: bool = False) -> list[torch.Tensor]:
    """Return the outputs and all gradients in float64; computed with autocast if `dtype` is bf16."""
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    model, inputs = deepcopy(model).to(wide), images.to(wide, memory_format=torch.channels_last).requires_grad_()
    if compiled:
        pad_convolutions(model)
        model = torch.compile(model, dynamic=False, fullgraph=True, options=COMBO | CHANNELS_LAST)
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        outputs = model(inputs)
    gradients = torch.autograd.grad(outputs.double().square().sum(), [inputs, *model.parameters()])
    return [tensor.double() for tensor in (outputs, *gradients)]


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    "conv",
    [nn.Conv2d(1, 20, 3), nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.Conv2d(20, 50, 5), nn.Conv2d(3, 64, 3, padding=1)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_padded_convolutions_round_like_eager_ones(conv, dtype):
    """Compiled, padded convolutions differ from float64 by no more than cuDNN's convolutions do."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = nn.Sequential(conv, nn.ReLU()).to("cuda", memory_format=torch.channels_last)
    images = torch.randn(256, conv.in_channels, 28, 28, device="cuda")
    exact = results_of(model, images, torch.float64)
    eager, padded = results_of(model, images, dtype), results_of(model, images, dtype, compiled=True)
    for wanted, theirs, ours in zip(exact, eager, padded, strict=True):
        errors = [((got - wanted).norm() / wanted.norm()).item() for got in (theirs, ours)]
        print(f"{conv} {dtype}: eager {errors[0]:.1e}, padded {errors[1]:.1e} of {tuple(wanted.shape)}")
        assert errors[1] <= 1.5 * errors[0] + torch.finfo(dtype).eps / 4


def options_name(case: Case) -> str:
    return name(case) + "-" + "-".join(key for key, on in case.performance._asdict().items() if on)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("case", ALONE, ids=options_name)
def test_performance_options_keep_the_result_on_a_gpu(case):
    assert_equal(graphed(1)[0][case], reference(case.reference()), 1e-6)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("case", TOGETHER, ids=options_name)
def test_performance_options_keep_the_result(case, size):
    outcomes = graphed(size)
    assert_equal(outcomes[0][case], reference(case.reference()), 1e-6)
    assert len({outcome[case].digest for outcome in outcomes}) == 1


AUTO = Performance("auto", "auto", "auto")
AUTO_ALONE = with_options(AUTO, *PLAIN, Case(Single, **MOVED), Case(Single, **RECIPE), Case(Single, loader="workers"))
AUTO_TOGETHER = with_options(AUTO, *REPLICAS, *MODEL_PARALLEL[2], ddp(**RECIPE), scratch(**MOVED))
AUTO_COMPILED = with_options(AUTO, ddp(epochs=1), scratch("bucketed", epochs=1), Case(Single, epochs=1))


def captured_by_auto(case: Case) -> bool:
    options = dict(case.options)
    on_host = options.get("offload", False) or options.get("checkpoint_activations", "none") != "none"
    captured = case.strategy in (Single, Scratch, DDP, FSDP, TP) or (case.strategy is Mesh and options["pp"] == 1)
    return captured and not on_host and case.loader == "device"


def run_automatically(cases: list[Case], device: str, gain: float) -> dict:
    """Run the cases and check which of them were captured, and compiled if compiling saves `gain` of a step.

    Those that are compiled run again, when the duration of their steps is known and nothing is captured only to measure it.
    """
    done: list[str] = []

    def noting(what: str, function):
        @wraps(function)
        def noted(*arguments, **more):
            done.append(what)
            return function(*arguments, **more)

        return noted

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    GraphStep.capture = noting("captured", GraphStep.capture)
    fastest.compile_step = noting("compiled", fastest.compile_step)
    fastest.GAINS = dict.fromkeys(fastest.GAINS, gain)

    def run_and_check(runtime: Runtime, case: Case):
        expected = ["captured"] if captured_by_auto(case) else []
        for found in [[*expected, "compiled", *expected], ["compiled", *expected]] if gain else [expected]:
            done.clear()
            outcome = run_case(runtime, case)
            assert done == found, f"{name(case)}: {done}"
        return outcome

    training.run_case = run_and_check  # all cases in one call of run_cases: a second group on the same store can hang
    return run_cases(cases, device)


@once
def automatic(size: int) -> list[dict]:
    return run_world(size, run_automatically, AUTO_ALONE if size == 1 else AUTO_TOGETHER, "cuda", 0.0, timeout=300)


@once
def automatic_in_one_process() -> dict:
    return run_world(1, run_automatically, with_options(AUTO, *one_process(2)), "cuda", 0.0, timeout=300)[0]


@once
def automatically_compiled(size: int) -> list[dict]:
    cases = [case for case in AUTO_COMPILED if (case.strategy is Single) == (size == 1)]
    return run_world(size, run_automatically, cases, "cuda", 1e9, timeout=300)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("case", AUTO_ALONE, ids=name)
def test_speed_auto_keeps_the_result_on_a_gpu(case):
    assert_equal(automatic(1)[0][case], reference(case.reference()), 1e-6)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", AUTO_TOGETHER, ids=name)
def test_speed_auto_keeps_the_result_on_two_gpus(case):
    assert_equal(automatic(2)[0][case], reference(case.reference()), 1e-6)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("index", range(5))
def test_speed_auto_keeps_the_result_of_one_process_over_gpus(index):
    case = with_options(AUTO, *one_process(2))[index]
    assert_equal(automatic_in_one_process()[case], reference(case.reference()), 1e-6)


@pytest.mark.parametrize(
    ("case", "size"),
    [
        pytest.param(case, size, marks=pytest.mark.gpu(size), id=name(case))
        for case in AUTO_COMPILED
        for size in [1 if case.strategy is Single else 2]
    ],
)
def test_speed_auto_keeps_the_result_if_it_compiles(case, size):
    assert_equal(automatically_compiled(size)[0][case], reference(case.reference()), 1e-6)


@pytest.mark.parametrize(
    "case", [pytest.param(Case(Single), marks=pytest.mark.gpu(1)), pytest.param(ddp(), marks=pytest.mark.gpu(2))], ids=name
)
@pytest.mark.parametrize("faster_first", [True, False])
def test_run_resumes_with_speed_auto_and_without(case, faster_first, tmp_path):
    size, (before, after) = 1 if case.strategy is Single else 2, (AUTO, OFF) if faster_first else (OFF, AUTO)
    run_world(size, run_cases, [replace(case, performance=before, save=str(tmp_path))], "cuda", timeout=120)
    second = replace(case, performance=after, resume=str(tmp_path / "pt" / "step_00000003.pt"))
    outcome = run_world(size, run_cases, [second], "cuda", timeout=120)[0][second]
    assert largest_difference(outcome.weights, reference(case.reference()).weights) < 1e-6


@pytest.mark.gpu(2)
@pytest.mark.parametrize("line", ["python", "torchrun --standalone --nproc_per_node=2"])
def test_speed_auto_reports_its_choices_once(line, tmp_path):
    strategy = "single" if line == "python" else "ddp"
    code, output = launch(
        f"{line} train.py strategy={strategy} speed=auto", *SMALL, "epochs=1", f"runs_dir={tmp_path}", gpus=True
    )
    assert code == 0, output
    assert output.count("speed=auto:") == output.count("cuda_graph      on") == output.count("compile         off") == 1, output


@pytest.mark.gpu(2)
@pytest.mark.parametrize("line", ["python", "torchrun --standalone --nproc_per_node=2"])
def test_speed_auto_runs_a_model_that_cannot_be_captured(line, tmp_path):
    strategy = "single" if line == "python" else "ddp"
    more = [*OWN, "speed=auto", "model._target_=own_models.Waiting", "epochs=2", f"runs_dir={tmp_path}"]
    code, output = launch(f"{line} train.py strategy={strategy}", *more, gpus=True)
    assert code == 0, output
    assert output.count("the step cannot be captured:") == 1, output
    assert len(read_metrics(only_run(tmp_path))) == 2


@pytest.mark.gpu(1)
def test_model_that_cannot_be_captured_is_an_error_if_the_config_requires_it(tmp_path):
    more = [*OWN, "model._target_=own_models.Waiting", "cuda_graph=true", f"runs_dir={tmp_path}"]
    code, output = launch("python train.py", *more, gpus=True)
    assert code != 0, output


@pytest.mark.gpu(1)
def test_captured_run_resumes_from_checkpoint(tmp_path):
    """The run resumes with the weights and the momentum of the file, not with those of the warm-up steps."""
    first = Case(Single, performance=BOTH, save=str(tmp_path))
    run_world(1, run_cases, [first], "cuda", timeout=120)
    second = replace(first, save="", resume=str(tmp_path / "pt" / "step_00000003.pt"))
    outcome = run_world(1, run_cases, [second], "cuda", timeout=120)[0][second]
    assert largest_difference(outcome.weights, reference(first.reference()).weights) < 1e-6


@pytest.mark.gpu(2)
def test_split_resumes_from_checkpoint_of_one_gpu(tmp_path):
    run_world(1, run_cases, [Case(Single, save=str(tmp_path))], "cuda", timeout=120)
    case = Case(Split, (devices(2), ("num_microbatches", 2)), resume=str(tmp_path / "pt" / "step_00000003.pt"))
    outcome, expected = run_world(1, run_cases, [case], "cuda", timeout=120)[0][case], reference(case.reference())
    assert largest_difference(outcome.weights, expected.weights) < 1e-6
    assert largest_difference(outcome.momentum, expected.momentum) < 1e-5


@pytest.mark.gpu(2)
def test_state_on_the_host_goes_into_checkpoints_and_back(tmp_path):
    """Checkpoints, whole and sharded, of runs whose state is in host memory equal others and resume under any strategy."""
    cases = {
        "host": mesh(shard=None, offload=True, epochs=2),
        "fsdp host": fsdp(offload=True, **SHORT | {"epochs": 2}),
        "sharded host": fsdp(offload=True, **SHORT | {"epochs": 2}),
        "device": mesh(shard=None, epochs=2),
    }
    expected = reference(cases["host"].reference())
    folders = {key: tmp_path / key for key in cases}
    for folder in folders.values():
        folder.mkdir()
    saving = [replace(case, save=str(folders[key])) for key, case in cases.items()]
    for case, outcome in run_world(2, run_cases, saving, "cuda", timeout=120)[0].items():
        assert largest_difference(outcome.weights, expected.weights) < 1e-6, name(case)
    files = {
        key: folders[key] / form / f"step_00000003.{form}"
        for key in cases
        for form in ["sharded" if "sharded" in key else "pt"]
    }
    resuming = [replace(case, resume=str(file)) for case in cases.values() for file in files.values()]
    for case, outcome in run_world(2, run_cases, resuming, "cuda", timeout=120)[0].items():
        assert len(outcome.sums) == 1, "it started from the beginning"
        assert largest_difference(outcome.weights, expected.weights) < 1e-6, (name(case), case.resume)


def memory_of(offload: bool) -> tuple[int, list[float]]:
    """Return the GPU's peak memory in bytes, of two steps of a ViT of 42 million parameters with AdamW, and the losses."""
    with Runtime("cuda") as runtime:
        runtime.open_group()
        strategy = FSDP(runtime, True, "local", None, "block", offload)
        torch.manual_seed(0)
        strategy.setup(vit(3, 28, 10, depth=24, width=384, heads=6, mlp_ratio=4.0, patch_size=7, pool="mean", drop_path=0.0))
        optimizer = torch.optim.AdamW(strategy.parameters(), lr=1e-3, fused=True)
        images, losses = torch.randn(2, 4, 3, 28, 28, device=runtime.device), []
        torch.cuda.reset_peak_memory_stats()
        for inputs in images:
            losses.append(strategy.forward_backward(inputs, torch.arange(4, device=runtime.device), 8)[0].item())
            optimizer.step()
            optimizer.zero_grad()
        del strategy, optimizer
        return torch.cuda.max_memory_allocated(), losses


@pytest.mark.gpu(2)
def test_state_on_the_host_saves_memory_of_the_gpu():
    for (device, losses), (host, host_losses) in zip(
        run_world(2, memory_of, False), run_world(2, memory_of, True), strict=True
    ):
        print(f"{device / 2**20:.0f} MiB with the state on the GPU, {host / 2**20:.0f} MiB on the host")
        assert losses == pytest.approx(host_losses, rel=1e-5)
        assert device > 16 * 42_000_000 / 2
        assert host < device / 3


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
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_faults_on_gpus(strategy, fault, restarts, code, status, said, tmp_path):
    """NCCL waits forever for a rank that has died, while gloo detects it."""
    line = f"torchrun --standalone --nproc_per_node=2 --max-restarts={restarts} train.py strategy={strategy}"
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
