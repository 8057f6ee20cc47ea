"""The tables of scripts/bench.py."""

import json

import pytest
from launches import finish, launch, start
from PIL import Image

from scripts.benchmark.launches import rank_of_bound
from scripts.benchmark.report import strongest, table


def row(loop: str, rate: float | None = None, devices: int = 1, strategy: str = "ddp", **more) -> dict:
    measured = {} if rate is None else {"rate": rate, "spread": 0.01}
    return {"model": "lenet", "devices": devices, "loop": loop, "strategy": strategy} | measured | more


ROWS = [
    row("tutorial", 100.0),
    row("stock overhead", 400.0),
    row("stock compile", skipped="not done within 70 s"),
    row("ours eager", 200.0, strategy="single"),
    row("ours", 1000.0, strategy="single"),
    row("kernels", 1250.0, strategy="single"),
    row("stock compile", 500.0, devices=2),
    row("ours", 1500.0, devices=2),
]


def test_strongest_loop_is_neither_ours_nor_the_kernels():
    assert strongest(ROWS, "lenet", 1) == 400.0
    assert strongest(ROWS, "lenet", 2) == 500.0
    assert strongest(ROWS, "resnet18", 1) is None


def test_table_has_the_ratio_to_the_strongest_other_loop_first():
    lines = table(ROWS).splitlines()[2:]
    assert lines[2] == "| lenet | 1 | stock compile | ddp | not run: not done within 70 s | | | | | |"
    assert lines[4] == "| lenet | 1 | ours | single | 1,000 | 1.0% | 2.50x | 10.00x |  | 80% |"
    assert lines[7] == "| lenet | 2 | ours | ddp | 1,500 | 1.0% | 3.00x |  | 75% |  |"


@pytest.mark.parametrize(("values", "rank"), [(1, 0), (4, 0), (5, 0), (8, 1), (10, 1), (20, 5), (100, 41), (1000, 473)])
def test_bound_of_a_median_is_that_of_tables_of_the_sign_test(values, rank):
    assert rank_of_bound(values) == rank


def test_bench_measures_ours_and_the_bare_loop_in_turns(tmp_path):
    line = (
        f"python scripts/bench.py --gpus 0 --models lenet --threads 1 --batch 2 --steps 4 --seconds 2 --json {tmp_path}/b.json"
    )
    code, output = launch(line)
    assert code == 0, output
    (row,) = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert row["pairs"] > 8, "it did not continue over several epochs"
    (ratio, bound), cpu = row["ratios"]
    assert 0 < bound <= ratio
    assert cpu[0] > 0.4, "our loop takes more than twice the CPU time of the bare loop"
    assert f"| lenet | 1 | 1 | 2 | {row['pairs']} |" in output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench.py --loops bare --repeats 1", "--repeats 1: must be at least 2, for the quartiles"),
        ("bench.py --gpus 1", "--gpus 1: this machine shows 0; use 0 for the CPU"),
        ("bench_vit.py resnet", "bench_vit.py needs a GPU, and none is visible"),
    ],
)
def test_benchmark_that_cannot_be_measured_is_refused_before_it_starts(line, message):
    assert launch(f"python scripts/{line}") == (1, f"error: {message}\n")


@pytest.mark.slow
def test_bench_measures_and_draws(tmp_path):
    line = (
        "python scripts/bench.py --gpus 0 --models lenet --repeats 2 --steps 8 --patience 100 --strategies ddp --loops tutorial"
    )
    process = start(line, "accelerate", "stock eager", "ours eager", "kernels", "--json", str(tmp_path / "b.json"))
    code, output = finish(process, timeout=240)
    assert code == 0, output
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [(row["devices"], row["loop"]) for row in rows] == [
        (devices, loop) for devices in (1, 2) for loop in ("tutorial", "accelerate", "stock eager", "ours eager", "kernels")
    ]
    assert all(row["rate"] > 0 for row in rows if row["loop"] in ("tutorial", "stock eager", "ours eager"))
    assert all(row["skipped"] == "CUDA graphs need a GPU" for row in rows if row["loop"] == "kernels")
    assert "| lenet | 2 | ours eager | ddp |" in output
    assert Image.open(tmp_path / "b.png").width > 700
