"""The equivalence matrix and the launch lines on real GPUs, NCCL between the ranks; each test skips where GPUs lack.

python -m pytest -m gpu
"""

import functools

import pytest
from launches import SMALL, launch, only_run, read_metrics
from test_equivalence import assert_equal, name
from test_launch import check_run
from training import Case, largest_difference, run_cases
from worlds import run_world

from ddp_lab.strategies.ddp import DDP
from ddp_lab.strategies.dp import DP
from ddp_lab.strategies.scratch import Scratch
from ddp_lab.strategies.single import Single
from ddp_lab.strategies.split import Split

WORLDS = [pytest.param(size, marks=pytest.mark.gpu(size)) for size in (2, 4)]
MANY = [
    Case(Scratch, (("algorithm", "per_tensor"),), start=1),
    Case(Scratch, (("algorithm", "flat"),), start=1),
    Case(Scratch, (("algorithm", "flat"),), samples=97, loader="workers"),
    Case(DDP, start=1),
    Case(DDP, samples=97, loader="workers"),
]


def devices(size: int) -> tuple[str, tuple[str, ...]]:
    return "devices", tuple(f"cuda:{i}" for i in range(size))


def one_process(size: int) -> list[Case]:
    return [
        Case(DP, (devices(size),)),
        Case(DP, (devices(size),), samples=97, loader="workers"),
        Case(Split, (devices(size), ("num_microbatches", 1))),
        Case(Split, (devices(size), ("num_microbatches", 4))),
        Case(Split, (devices(size), ("num_microbatches", 5)), samples=97, loader="workers"),
    ]


@functools.cache
def reference(samples: int):
    case = Case(Single, samples=samples)
    return run_world(1, run_cases, [case], "cuda")[0][case]


@functools.cache
def world(size: int) -> list[dict]:
    return run_world(size, run_cases, MANY, "cuda")


@functools.cache
def alone(size: int) -> dict:
    return run_world(1, run_cases, one_process(size), "cuda")[0]


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("case", MANY, ids=name)
def test_several_processes_equal_one_gpu(case, size):
    outcome = world(size)[0][case]
    print(f"{name(case)} on {size}: {largest_difference(outcome.weights, reference(case.samples).weights):.1e}")
    assert_equal(outcome, reference(case.samples))


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("index", range(5))
def test_one_process_over_gpus_equals_one_gpu(index, size):
    case = one_process(size)[index]
    outcome = alone(size)[case]
    print(f"{name(case)} on {size}: {largest_difference(outcome.weights, reference(case.samples).weights):.1e}")
    assert_equal(outcome, reference(case.samples))


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("strategy", ["ddp", "scratch"])
def test_torchrun_with_a_gpu_for_each_rank(strategy, size, tmp_path):
    line = f"torchrun --standalone --nproc_per_node={size} train.py strategy={strategy} device=cuda"
    code, output = launch(line, "epochs=2", "data.loader=workers", f"runs_dir={tmp_path}", gpus=True)
    assert code == 0, output
    assert f"{strategy} on {size} x NVIDIA" in output
    check_run(only_run(tmp_path), epochs=2, strategy=strategy, world_size=size)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("strategy", ["single", "dp", "split"])
def test_python_on_gpus(strategy, tmp_path):
    code, output = launch(f"python train.py strategy={strategy}", "epochs=20", f"runs_dir={tmp_path}", gpus=True)
    assert code == 0, output
    assert "NVIDIA" in output.splitlines()[-1]
    assert read_metrics(only_run(tmp_path))[-1]["test_accuracy"] >= 0.95


@pytest.mark.gpu(2)
def test_bf16(tmp_path):
    line = "torchrun --standalone --nproc_per_node=2 train.py strategy=ddp precision=bf16"
    code, output = launch(line, f"runs_dir={tmp_path}", gpus=True)
    assert code == 0, output
    assert read_metrics(only_run(tmp_path))[-1]["test_accuracy"] >= 0.9


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
def test_gpus_that_are_not_there(line, message, tmp_path):
    code, output = launch(line, *SMALL[:-2], f"runs_dir={tmp_path}", gpus=True)
    assert code != 0
    assert output.count(message) == 1, output
    assert "cuda:0 (NVIDIA" in output, "the message lists what is there"
