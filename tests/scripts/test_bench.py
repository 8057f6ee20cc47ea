"""scripts/bench.py: its tables, and runs of it on the CPU."""

import json

import pytest
from launches import launch

from scripts.bench import table

ROWS = [
    {"model": "lenet", "devices": 1, "loop": "stock overhead", "strategy": "ddp", "rate": 400.0, "spread": 0.01},
    {"model": "lenet", "devices": 1, "loop": "stock compile", "strategy": "ddp", "skipped": "not done within 70 s"},
    {"model": "lenet", "devices": 1, "loop": "ours", "strategy": "single", "rate": 1000.0, "spread": 0.01},
    {"model": "lenet", "devices": 2, "loop": "stock compile", "strategy": "ddp", "rate": 500.0, "spread": 0.01},
    {"model": "lenet", "devices": 2, "loop": "ours", "strategy": "ddp", "rate": 1500.0, "spread": 0.01},
]


def test_table_has_the_ratio_to_the_strongest_other_loop():
    lines = table(ROWS).splitlines()[2:]
    assert lines[1] == "| lenet | 1 | ddp | stock compile | not run: not done within 70 s | | | |"
    assert lines[2] == "| lenet | 1 | single | ours | 1,000 | 1.0% | 1.00x | 2.50x |"
    assert lines[4] == "| lenet | 2 | ddp | ours | 1,500 | 1.0% | 1.50x | 3.00x |"


@pytest.mark.slow
def test_bench_measures_every_kind_of_loop(tmp_path):
    line = "python scripts/bench.py --gpus 0 --models lenet --repeats 2 --steps 8 --patience 100 --loops bare"
    code, output = launch(line, "stock eager", "ours eager", "--json", str(tmp_path / "b.json"))
    assert code == 0, output
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    loops = [(devices, loop) for devices in (1, 2) for loop in ("bare", "stock eager", "ours eager")]
    assert [(row["devices"], row["loop"]) for row in rows] == loops
    assert all(row["rate"] > 0 for row in rows)
