"""scripts/bench.py: its tables, and runs of it on the CPU."""

import json

import pytest
from launches import launch

from scripts.bench import resumed, table
from scripts.bench_pairs import WARM_UP, lower_bound, ratios

ROWS = [
    {
        "model": "lenet",
        "devices": 1,
        "loop": "stock overhead",
        "strategy": "ddp",
        "rate": 400.0,
        "spread": 0.01,
    },
    {
        "model": "lenet",
        "devices": 1,
        "loop": "stock compile",
        "strategy": "ddp",
        "skipped": "not done within 70 s",
    },
    {
        "model": "lenet",
        "devices": 1,
        "loop": "ours",
        "strategy": "single",
        "rate": 1000.0,
        "spread": 0.01,
    },
    {
        "model": "lenet",
        "devices": 2,
        "loop": "stock compile",
        "strategy": "ddp",
        "rate": 500.0,
        "spread": 0.01,
    },
    {
        "model": "lenet",
        "devices": 2,
        "loop": "ours",
        "strategy": "ddp",
        "rate": 1500.0,
        "spread": 0.01,
    },
]


def test_table_has_the_ratio_to_the_strongest_other_loop():
    lines = table(ROWS).splitlines()[2:]
    assert lines[1] == "| lenet | 1 | ddp | stock compile | not run: not done within 70 s | | | |"
    assert lines[2] == "| lenet | 1 | single | ours | 1,000 | 1.0% | 1.00x | 2.50x |"
    assert lines[4] == "| lenet | 2 | ddp | ours | 1,500 | 1.0% | 1.50x | 3.00x |"


@pytest.mark.slow
def test_bench_measures_every_kind_of_loop(tmp_path):
    line = (
        "python scripts/bench.py --gpus 0 --models lenet --repeats 2 --steps 8 --patience 100 "
        "--loops bare"
    )
    code, output = launch(line, "stock eager", "ours eager", "--json", str(tmp_path / "b.json"))
    assert code == 0, output
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    loops = [
        (devices, loop) for devices in (1, 2) for loop in ("bare", "stock eager", "ours eager")
    ]
    assert [(row["devices"], row["loop"]) for row in rows] == loops
    assert all(row["rate"] > 0 for row in rows)


def row_of(bare: float, epoch: float) -> dict:
    return {"bare": [bare, 1.0], "epoch_before": [epoch, 1.0]}


def test_ratio_of_an_epoch_is_to_the_bare_steps_around_it():
    warm_up = [row_of(9.0, 1.0)] * WARM_UP
    rows = [*warm_up, row_of(1.0, 9.0), row_of(4.0, 2.5), row_of(4.0, 5.0)]
    assert ratios(rows, clock=0) == [2.0 / 2.5, 4.0 / 5.0]
    assert ratios(rows, clock=1) == [1.0, 1.0]


def test_lower_bound_is_below_the_median_by_order_statistics():
    # Of 21 values the 7th smallest: P(at most 6 of 21 throws) = 0.039, of at most 7 0.095.
    assert lower_bound([float(value) for value in range(1, 22)]) == 7.0
    assert lower_bound([3.0, 2.0]) == 2.0


def test_second_call_keeps_what_is_measured_and_tries_the_others_again():
    keys = {"model": "lenet", "devices": 2, "loop": "ours", "batch": 8}
    measured = keys | {"strategy": "ddp", "rate": 5.0}
    failed = keys | {"strategy": "fsdp", "skipped": "not done within 5 s"}
    of_another_call = keys | {"strategy": "tp", "rate": 7.0}
    wanted = [keys | {"strategy": "ddp"}, keys | {"strategy": "fsdp"}]
    rows = resumed(wanted, [failed, of_another_call, measured])
    assert rows == [measured, wanted[1], of_another_call]


@pytest.mark.slow
def test_bench_pairs_our_loop_with_the_bare_one(tmp_path):
    line = "python scripts/bench.py --gpus 0 --models vit_tiny --steps 4 --patience 100"
    code, output = launch(line, "--json", str(tmp_path / "b.json"))
    assert code == 0, output
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [(row["devices"], row["loop"]) for row in rows] == [
        (devices, "ours beside bare") for devices in (1, 2)
    ]
    assert all(len(row["ratios"]) >= 20 for row in rows)


STOCKS = ["ddp", "fsdp", "scratch-bucketed", "pipeline", "mesh tp=2"]


@pytest.mark.slow
def test_every_strategy_has_a_stock_loop_that_runs_on_two_ranks(tmp_path):
    line = "python scripts/bench.py --gpus 0 --models vit_tiny --repeats 2 --steps 4 --patience 200"
    more = ["--loops", "stock", "--json", str(tmp_path / "b.json"), "--strategies", *STOCKS]
    code, output = launch(line, *more)
    assert code == 0, output
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [row["strategy"] for row in rows] == ["single", *STOCKS]
    assert not [row["skipped"] for row in rows if "skipped" in row]
    assert all(row["rate"] > 0 for row in rows)
