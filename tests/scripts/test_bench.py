"""scripts/bench.py: its tables, and runs of it on the CPU."""

import json

import pytest
import torch
from launches import launch
from slow_rows import extra

from ddp_lab.config.errors import ConfigError
from scripts.bench import resumed
from scripts.bench_layouts import Layout, config_of, lay_out, misfit
from scripts.bench_models import MODELS
from scripts.bench_pairs import WARM_UP, lower_bound, ratios
from scripts.bench_table import table

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
    assert lines[1] == (
        "| lenet | 1 | ddp | stock compile | not run: not done within 70 s |  |  |  |  |  |  |"
    )
    assert lines[2] == "| lenet | 1 | single | ours | 1,000 | 1.0% | 1.00x | 100% |  |  | 2.50x |"
    assert lines[4] == "| lenet | 2 | ddp | ours | 1,500 | 1.0% | 1.50x | 75% |  |  | 3.00x |"


def test_table_has_the_planned_memory_and_the_bubble_of_a_pipeline():
    one = {"model": "gpt2_tied", "devices": 1, "strategy": "single", "loop": "ours"}
    four = one | {"devices": 4, "strategy": "pipeline"}
    rows = [
        one | {"rate": 500.0, "spread": 0.01, "peak": 3 * 2**30, "planned": 4 * 2**30},
        four
        | {"rate": 1600.0, "spread": 0.0, "bubble": 0.2, "planned": 2**30, "disabled": ["compile"]},
        four | {"loop": "stock", "skipped": "torch has no loop like strategy=x"},
        four | {"devices": 8, "planned": 2**29},
    ]
    lines = [line.split(" | ") for line in table(rows).splitlines()[2:]]
    assert [line[3] for line in lines] == ["ours", "ours, no compile", "stock", "ours"]
    cells = [line[4:] for line in lines]
    assert cells == [
        ["500", "1.0%", "1.00x", "100%", "3.00", "4.00", " |"],
        ["1,600", "0.0%", "3.20x", "80%; 100% without the bubble of 20%", "", "1.00", " |"],
        ["not run: torch has no loop like strategy=x", "", "", "", "", "", " |"],
        ["not measured", "", "", "", "", "0.50", " |"],
    ]


@pytest.mark.parametrize(
    ("strategy", "ranks", "layout"),
    [
        ("scratch-bucketed", 8, Layout(replicate=8)),
        ("fsdp", 4, Layout(shard=4)),
        ("mesh shard=null tp=2", 8, Layout(shard=4, tp=2)),
        ("mesh shard=2", 8, Layout(replicate=4, shard=2)),
        (
            "mesh pp=2 tp=2 num_microbatches=4",
            8,
            Layout(2, replicate=2, tp=2, schedule="1f1b", num_microbatches=4),
        ),
        (
            "pipeline schedule=interleaved1f1b num_microbatches=16",
            8,
            Layout(8, schedule="interleaved1f1b", num_microbatches=16),
        ),
        (
            "ddp_pipeline pp=4",
            8,
            Layout(4, replicate=2, schedule="1f1b", num_microbatches=8),
        ),
    ],
)
def test_layout_has_the_axes_of_the_strategy(strategy, ranks, layout):
    assert lay_out(config_of(strategy), ranks, 8) == layout


def test_strategy_that_does_not_fit_the_devices_or_the_model_is_left_out():
    with pytest.raises(ConfigError, match="2 is not divisible by 4"):
        lay_out(config_of("mesh pp=2 tp=2"), 2, 8)
    with pytest.raises(ConfigError, match="must not exceed the 16 samples"):
        lay_out(config_of("pipeline num_microbatches=32"), 2, 8)
    with torch.device("meta"):
        resnet = MODELS["resnet18"].make()
        gpt = MODELS["gpt2_tied"].make()
    assert sum(parameter.numel() for parameter in gpt.parameters()) == 124_475_904
    interleaved = Layout(8, schedule="interleaved1f1b", num_microbatches=16)
    sixteen = "the model has 14 blocks, and this schedule needs 16 stages"
    assert misfit(interleaved, "pipeline", gpt) == sixteen
    assert interleaved.bubble == 7 / 39
    no_plan = "the model's blocks have no plan for tensor parallelism"
    assert misfit(Layout(tp=2), "mesh tp=2", resnet) == no_plan
    assert misfit(Layout(tp=2), "mesh tp=2", gpt) is None
    assert misfit(Layout(tp=2), "tp tp=2", resnet) is None


@pytest.mark.slow
def test_bench_measures_every_kind_of_loop(tmp_path):
    line = (
        "python scripts/bench.py --gpus 0 --ranks 2 --models lenet --repeats 2 --steps 8 "
        "--patience 100 --loops bare"
    )
    code, output = launch(line, "stock eager", "ours eager", "--json", str(tmp_path / "b.json"))
    assert code == 0, output
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    loops = [(2, loop) for loop in ("bare", "stock eager", "ours eager")]
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


def test_plan_of_a_row_remains_when_it_is_measured_again():
    keys = {"model": "lenet", "devices": 2, "strategy": "ddp", "loop": "ours", "batch": 8}
    failed = keys | {"skipped": "not done within 5 s", "planned": 7}
    assert resumed([keys | {"launches": 0}], [failed]) == [keys | {"launches": 0, "planned": 7}]
    planned = keys | {"launches": 0, "planned": 7}
    new = keys | {"launches": 0, "layout": {}}
    assert resumed([new], [planned]) == [new | planned]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategies", "loop"),
    [
        (["ddp"], "stock float32 sums"),
        (["mesh tp=2"], "stock"),
        *extra(
            [
                (["ddp", "fsdp", "scratch-bucketed"], "stock"),
                (["pipeline", "pipeline schedule=interleaved1f1b"], "stock"),
            ]
        ),
    ],
)
def test_every_strategy_has_a_stock_loop_that_runs_on_two_ranks(strategies, loop, tmp_path):
    line = "python scripts/bench.py --gpus 0 --ranks 2 --models vit_tiny"
    line += " --repeats 2 --steps 4 --patience 200"
    chosen = ["--loops", loop, "--strategies", *strategies]
    code, output = launch(line, *chosen, "--json", str(tmp_path / "b.json"))
    assert code == 0, output
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [(row["strategy"], row["loop"]) for row in rows] == [
        (strategy, loop) for strategy in strategies
    ]
    assert not [row["skipped"] for row in rows if "skipped" in row]
    assert all(row["rate"] > 0 for row in rows)


@pytest.mark.slow
def test_bench_measures_what_was_planned_and_says_what_is_left_out(tmp_path):
    line = "python scripts/bench.py --gpus 0 --models gpt_tiny --repeats 2 --steps 4 --patience 100"
    chosen = ["--json", str(tmp_path / "b.json"), "--loops", "ours eager", "--strategies"]
    chosen += ["mesh shard=null", "mesh pp=2 tp=2"]
    code, output = launch(f"{line} --plan cpu", *chosen)
    assert code == 0, output
    left_out = "left out: gpt_tiny on 2, mesh pp=2 tp=2: strategy.pp=2 strategy.tp=2: cannot lay 2"
    assert left_out in output
    planned = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [row["strategy"] for row in planned] == ["single", "mesh shard=null"]
    assert all(row["planned"] > 0 and not row["launches"] for row in planned)
    code, output = launch(line, *chosen)
    assert code == 0, output
    measured = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [row["planned"] for row in measured] == [row["planned"] for row in planned]
    assert all(row["rate"] > 0 and row["peak"] > 2**27 for row in measured), output
    assert left_out in output
